"""Makes a new job from a recipe, a model and a number of devices: the planner chooses the grid."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from raymega.cli.init.heads import set_rows, with_new_head
from raymega.cli.init.images import (
    BYTES,
    TUNED,
    check_tower,
    set_image_rows,
    with_new_tower,
)
from raymega.cli.init.job_text import job_text
from raymega.cli.init.recipes import RECIPES, SCALES, Recipe, Scale
from raymega.cli.init.starting_model import (
    StartingModel,
    span_tokens,
    special_tokens,
    starting_model,
)
from raymega.config.data import SYNTHETIC_PATH
from raymega.config.encoder import SpanCorruptionSection
from raymega.config.load import ParsedJob, parse_mapping
from raymega.config.schema import ModelSection
from raymega.data.format import META_FILE, read_meta
from raymega.data.streaming.remote_dataset import is_remote
from raymega.errors import ConfigError, raise_faults
from raymega.plan.hardware.catalog_file import find_accelerator
from raymega.plan.layers.encoder_decoder import raw_length
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.validation.registry import job_faults
from raymega.planner.search.selection import Choice, best_grid

CPU = "cpu"
CPU_PROCESSES = 2
"""Number of workers of a job on the CPUs of one machine."""
GPU, NODE_GPUS = "h100", 8
"""Accelerator of a job on GPUs, where none is named, and their number, where none is given."""
YOUR_TOKENS = "my-tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Answers from which a new job is made.

    Attributes:
        recipe: Name of a recipe.
        model: Folder of Hugging Face or URI of a checkpoint; empty for the recipe's own model.
        gpus: Number of workers; 0 for two CPU processes, or a node of ``gpu``.
        gpu: Accelerator of each worker; empty for the default.
        data: Dataset of the run; empty for built-in tokens, with a placeholder beside.
        teacher: Folder of Hugging Face or URI of a checkpoint; of the recipe distill alone.
        out: File to write.
    """

    recipe: str
    model: str = ""
    gpus: int = 0
    gpu: str = ""
    data: str = ""
    teacher: str = ""
    out: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class NewJob:
    """A job that can be planned as it stands.

    Attributes:
        text: Text of its file.
        choice: Choice of its layout, with reasons.
        before: Commands to run before `raymega train`.
    """

    text: str
    choice: Choice
    before: list[str]


def as_word(path: Path) -> str:
    """Return a path as a word of a command line: quoted, and none of its options."""
    return quote(f"./{path}" if str(path).startswith("-") else str(path))


def new_job(answers: Answers) -> NewJob:
    """Return the job of ``answers``, on the grid that the planner recommends.

    Raises:
        ConfigError: The model is refused.
        PlanError: No such accelerator, or no layout fits into its memory.
    """
    # device and model
    device = find_accelerator(answers.gpu or (GPU if answers.gpus else CPU))
    scale = SCALES["cpu" if device.shared_cores else "cuda"]
    num_workers = answers.gpus or (CPU_PROCESSES if device.shared_cores else NODE_GPUS)
    recipe = RECIPES[answers.recipe]
    start = starting_model(answers.model) if answers.model else None
    model, start_rules = _model_of(answers, scale, start)
    teacher = starting_model(answers.teacher, option="--teacher") if answers.teacher else None
    # the job without a layout, then the planner's
    numbers = recipe if start or recipe.name != "vision" else RECIPES["pretrain"]
    values = _values(answers, numbers, scale, model.model_dump(mode="json", exclude_defaults=True))
    values["data"]["seq_len"] = min(scale.seq_len, _longest(model))
    source = _set_data(values, model, recipe, start)
    values["data"]["global_batch_size"] = num_workers * -(-scale.least_sequences // num_workers)
    if device.name != CPU:
        values["cluster"]["accelerator"] = answers.gpu or GPU
    if recipe.name != "pretrain" and start:
        values["checkpoint"] |= {"init_from": start.init_from, **start_rules}
    if teacher:
        _set_teacher(values, teacher)
    parsed = _checked(values)
    choice = best_grid(parsed.job(), num_workers, device)
    whole = _checked(values, choice.overrides)
    before = [teacher.import_line] if teacher and teacher.import_line else []
    own_tokenizer = BYTES if model.vision.is_on else f"bpe:{model.vocab_size}"
    before += _lines_before(start, answers, own_tokenizer, source)
    has_note = recipe.data_note and not model.head.is_on
    notes = _notes(answers, choice) | ({"data.loss_on": [recipe.data_note]} if has_note else {})
    text = job_text(whole.raw, head=_head(answers, recipe, before), notes=notes)
    return NewJob(text=text, choice=choice, before=before)


def _model_of(
    answers: Answers, scale: Scale, start: StartingModel | None
) -> tuple[ModelSection, dict[str, list[str]]]:
    """Return the model of the job, and the fields by which it starts from weights of another form."""
    model = start.model if start else _own_model(scale, answers.data)
    if answers.recipe == "classify":
        return with_new_head(model)
    if answers.recipe == "vision" and start:
        check_tower(model, answers.model)
    elif answers.recipe == "vision":
        model = with_new_tower(model, scale.tower, answers.data)
    return model, {}


def _longest(model: ModelSection) -> int:
    """Return the most tokens of a row."""
    return model.longest_row - parts_of(model).first_position


def _set_data(
    values: dict[str, dict[str, Any]],
    model: ModelSection,
    recipe: Recipe,
    start: StartingModel | None,
) -> str:
    """Set what the rows of a model need in a job's values, and return the input of `raymega data prepare`."""
    tokenizer, parts = start.tokenizer if start else "", parts_of(model)
    if parts.is_encoder_decoder:
        _set_streams(values, model, tokenizer)
    if model.head.is_on:
        return set_rows(values, model)
    if not parts.is_causal:
        values["data"]["masking"] = special_tokens(tokenizer)
    if not model.vision.is_on:
        return recipe.input
    if recipe.name == "vision" and start:
        values["model"] |= TUNED
    return set_image_rows(values, model, longest=_longest(model))


def _set_teacher(values: dict[str, dict[str, Any]], teacher: StartingModel) -> None:
    """State a teacher's model and checkpoint, and a length that it reads."""
    model = teacher.model
    values["distillation"] |= {
        "teacher_checkpoint": teacher.init_from,
        "teacher_model": model.model_dump(mode="json", exclude_defaults=True),
    }
    values["data"]["seq_len"] = min(values["data"]["seq_len"], _longest(model))


def _set_streams(values: dict[str, dict[str, Any]], model: ModelSection, tokenizer: str) -> None:
    """Divide a row between encoder and decoder, and state the text that becomes a row."""
    seq_len = values["data"]["seq_len"]
    spans = SpanCorruptionSection.model_validate(span_tokens(tokenizer, model.vocab_size))
    decoder = seq_len // 4
    sides = values["model"].get("encoder_decoder", {})
    values["model"]["encoder_decoder"] = {**sides, "decoder_seq_len": decoder}
    text = raw_length(spans, seq_len - decoder, decoder)
    values["data"]["span_corruption"] = {
        "text_seq_len": text,
        **spans.model_dump(exclude_defaults=True),
    }


def _own_model(scale: Scale, data: str) -> ModelSection:
    """Return the recipe's own model, with the vocabulary of a dataset that is on this machine."""
    if not data or is_remote(data) or not (Path(data) / META_FILE).is_file():
        return scale.model
    return scale.model.model_copy(update={"vocab_size": read_meta(Path(data)).vocab_size})


def _values(
    answers: Answers, recipe: Recipe, scale: Scale, model: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the values that recipe and scale state, by section and field."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", answers.out.stem).lstrip("._-")[:100] or recipe.name
    values: dict[str, dict[str, Any]] = {
        "run": {"name": name},
        "model": dict(model),
        "data": {"path": answers.data or SYNTHETIC_PATH},
    }
    for path, value in {**recipe.fields, **scale.fields}.items():
        section, _, field = path.partition(".")
        values.setdefault(section, {})[field] = value
    if scale is SCALES["cpu"]:
        steps = recipe.cpu_steps
        values["run"] |= {"steps": steps, "eval_every": steps // 2}
        values["optimizer"]["lr_warmup_steps"] = steps // 10
        values["checkpoint"]["every"] = steps // 2
    return values


def _checked(values: Mapping[str, Any], overrides: tuple[str, ...] = ()) -> ParsedJob:
    parsed = parse_mapping(values).with_overrides(overrides)
    raise_faults(ConfigError, [*parsed.faults, *job_faults(parsed.values)])
    return parsed


def _lines_before(
    start: StartingModel | None, answers: Answers, own_tokenizer: str, source: str
) -> list[str]:
    """Return the commands that make what the job names: weights and tokens; ``own_tokenizer`` is of a model of its own."""
    lines = [start.import_line] if start and start.import_line else []
    if not answers.data:
        own = quote(start.tokenizer) if start and start.tokenizer else "TOKENIZER.json"
        tokenizer = own if start else own_tokenizer
        lines.append(f"raymega data prepare {source} --tokenizer {tokenizer} --out {YOUR_TOKENS}")
    return lines


def _head(answers: Answers, recipe: Recipe, before: list[str]) -> list[str]:
    return [
        f"Trains {recipe.summary}. Written by `raymega init {recipe.name}`; every field is yours to change.",
        "`raymega plan` shows what follows from the file. In this order:",
        *(f"  {line}" for line in before),
        f"  raymega plan {as_word(answers.out)}",
        f"  raymega train {as_word(answers.out)}",
    ]


def _notes(answers: Answers, choice: Choice) -> dict[str, list[str]]:
    """Return comments that say more than a field's description."""
    notes = {"parallel": [f"Chosen by the planner. {sentence}." for sentence in choice.reasons[:1]]}
    notes["parallel"] += [f"{sentence}." for sentence in choice.reasons[1:3]]
    if not answers.data:
        notes["data.path"] = [
            "Built-in tokens, so that the file runs as it is. Yours, which `raymega data prepare` wrote:",
            f"  path: {YOUR_TOKENS}",
        ]
    return notes
