"""Generation of text by a checkpoint: transformers' `generate` on an export, or full recompute on a grid.

`cli/generate.py` prints the answers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.encoder import NO_TOKEN
from raymega.config.grid_text import degrees_of
from raymega.convert.huggingface.extra_files import GENERATION_CONFIG, carried_config
from raymega.data.format import TOKENIZER_FILE
from raymega.data.text_codec import TextCodec
from raymega.data.tokenizer_files import special_ids
from raymega.errors import ConfigError, Fault, NumericsError, WorkerError, counted, raise_faults
from raymega.evaluate.run import EvalOptions, plan_of
from raymega.evaluate.tokenizer import model_files
from raymega.extras import import_extra
from raymega.generate.answers import Task
from raymega.generate.exported import exported, one_device_plan
from raymega.generate.image_prompts import NO_IMAGES, PromptImages, prompt_tokens, read_images
from raymega.generate.prompts import Prompt, Prompts, read_prompts
from raymega.messages import EntryOutput, Progress, Report
from raymega.orchestrate.core.worker_group_api import AttemptSpec, WorkerStatus
from raymega.orchestrate.workers.single_run import run_entry
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.run_plan import RunPlan
from raymega.plan.sampling import Sampling, no_choice, sampling_faults
from raymega.session import session_at

ENTRY = "raymega.generate.worker"
ENGINE = "raymega.generate.with_transformers"
BATCH_SIZE = 8

OnCount = Callable[[str, int, int], None]
"""Function that is told a unit, how many of it are done, and of how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Options of a generation.

    Attributes:
        sampling: Choice of the tokens, and where an answer ends.
        grid: Degrees of the grid, such as ``tp=2``, on which each token takes a full forward pass; empty
            generates with transformers on one device.
        overrides: Texts ``section.field=value`` that override fields of the generation's job.
        folder: Folder of the exported model, which is kept and used again; None is a temporary one.
        batch_size: Number of prompts that transformers continues at once.
    """

    sampling: Sampling = field(default_factory=Sampling)
    grid: str = ""
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    batch_size: int = BATCH_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer to a prompt.

    Attributes:
        prompt: Text of the prompt.
        text: Text after it, before a stop string and the end-of-text token.
        tokens: New tokens, with those of the stop string and the end.
        finish_reason: ``stop`` (a stop string), ``end`` (the model ended the text) or ``length``.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A generation that is ready to run.

    Attributes:
        checkpoint: Checkpoint whose weights generate.
        plan: Plan of the grid; of one device without one.
        texts: Text of each prompt.
        task: Tokens of the prompts, and what ends an answer.
        options: Options of the user.
    """

    checkpoint: Checkpoint
    plan: RunPlan
    texts: Sequence[str]
    task: Task
    options: GenerateOptions

    def run(self, address: str, on_count: OnCount) -> list[Answer]:
        """Return the answers, in the order of the prompts.

        Args:
            address: Address of the Ray cluster that holds the grid; not used without a grid.
            on_count: Function that is told how far the generation is.

        Raises:
            ConfigError: transformers has no such model.
            NumericsError: Logits are NaN or Inf.
            WorkerError: A worker failed.
            CapacityError: The cluster has no room for the grid.
        """
        if not self.options.grid:
            found = self._with_transformers(on_count)
        else:
            with session_at(address):
                found = self._on_grid(on_count)
        codec, answers = self.task.codec(), []
        for number, (prompt, tokens) in enumerate(zip(self.texts, found, strict=True)):
            text, reason = self.task.answer(codec, number, tokens)
            answers.append(
                Answer(prompt=prompt, text=text, tokens=tuple(tokens), finish_reason=reason)
            )
        return answers

    def _with_transformers(self, on_count: OnCount) -> list[list[int]]:
        engine = import_extra(ENGINE, extra="hf", purpose="raymega generate without --grid")
        dtype, num_prompts = self.plan.job.precision.dtype, len(self.texts)
        base, kept = self.plan.job.checkpoint.init_from, self.options.folder
        with exported(self.checkpoint, dtype=dtype, folder=kept, base=base) as folder:
            model = engine.Engine(folder, device=self.plan.job.cluster.device)
            found: list[list[int]] = model.generate(
                self.task,
                vision=self.plan.job.model.vision,
                batch_size=self.options.batch_size,
                on_answers=lambda count: on_count("answers", count, num_prompts),
            )
        return found

    def _on_grid(self, on_count: OnCount) -> list[list[int]]:
        outputs: list[bytes] = []
        longest = max(self.task.limits)

        def hear(report: Report | WorkerStatus) -> None:
            if isinstance(report, EntryOutput):
                outputs.append(report.data)
            elif isinstance(report, Progress) and report.rank == 0:
                on_count("tokens", report.step, longest)

        store, manifest = self.checkpoint
        spec = AttemptSpec(
            plan_json=self.plan.to_json(),
            run_uri=store.uri,
            attempt=0,
            restore=f"{store.uri}/{manifest.key}",
            entry_input=self.task.pack(),
        )
        log_dir = Path(tempfile.gettempdir()) / "raymega-generate"
        done = run_entry(self.plan, spec, ENTRY, log_dir=log_dir, on_report=hear)
        if done.fault is not None:
            raise WorkerError(done.fault)
        (output,) = outputs
        answers: list[list[int]] = json.loads(output)
        ended = [number for number, tokens in enumerate(answers) if tokens[-1] == NO_TOKEN]
        raise_faults(
            NumericsError, [no_choice(number, len(answers[number]) - 1) for number in ended]
        )
        return answers


def prepare_generation(uri: str, prompts: Prompts, options: GenerateOptions) -> Generation:
    """Return a generation that is ready to run, or refuse before anything starts.

    Args:
        uri: URI of a run's folder, of one of its checkpoints or of a manifest.
        prompts: Prompts as the user gives them.
        options: Sampling, grid and folder.

    Raises:
        ConfigError: The checkpoint, a prompt, the sampling or the grid is wrong, or a package is missing.
    """
    raise_faults(ConfigError, list(sampling_faults(options.sampling)))
    if not options.grid:
        import_extra("transformers", extra="hf", purpose="raymega generate without --grid")
    # the model's tokenizer, and the prompts in its tokens
    checkpoint = open_checkpoint(uri)
    files = model_files(checkpoint)
    codec = TextCodec(files[TOKENIZER_FILE])
    given = read_prompts(prompts, files, source=checkpoint.store.uri)
    # the plan, once its row length is known
    one = one_device_plan(checkpoint, options.overrides)
    most = one.job.model.longest_row
    raise_faults(ConfigError, _vocabulary_faults(codec, one))
    vision = one.job.model.vision
    images = read_images(given, vision, (prompts.chat or prompts.file or Path("x")).parent)
    task = make_task(
        files,
        given,
        options.sampling,
        most=most,
        is_rendered=prompts.chat is not None,
        is_continued=not parts_of(one.job.model).is_encoder_decoder,
        images=images,
    )
    plan = one
    if options.grid:
        lengths = (len(each) + limit for each, limit in zip(task.prompts, task.limits, strict=True))
        plan = plan_of(
            checkpoint,
            EvalOptions(
                grid=options.grid,
                overrides=options.overrides,
                seq_len=_row_length(max(*lengths, vision.num_patches + 1), options.grid),
            ),
        )
    texts = [each.text for each in given]
    return Generation(checkpoint=checkpoint, plan=plan, texts=texts, task=task, options=options)


def make_task(  # noqa: PLR0913  # each is one part of a task
    files: Mapping[str, bytes],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    most: int,
    is_rendered: bool = False,
    is_continued: bool = True,
    images: PromptImages = NO_IMAGES,
) -> Task:
    """Return the task of continuing ``prompts``.

    Args:
        files: Files of the model, by name: its tokenizer, and what tells where a text ends.
        prompts: Prompts.
        sampling: Choice of the tokens.
        most: Number of tokens that the model reads at most.
        is_rendered: True if a chat template made the texts, with their first token.
        is_continued: True if the model continues a prompt; one with a decoder beside it begins a text of its own.
        images: Images of the prompts.

    Raises:
        ConfigError: A prompt has no token, leaves no room for an answer, or has other images than marks.
    """
    codec = TextCodec(files[TOKENIZER_FILE])
    tokens = prompt_tokens(codec, prompts, images, is_rendered=is_rendered)
    raise_faults(ConfigError, _length_faults([each.text for each in prompts], tokens, most))
    return Task(
        prompts=tokens,
        limits=[min(sampling.max_tokens, most - len(each)) for each in tokens],
        sampling=sampling,
        tokenizer_json=files[TOKENIZER_FILE].decode(),
        end_ids=sorted(end_ids(files)),
        images=images.pixels,
        is_continued=is_continued and not is_rendered,
    )


def generate(
    uri: str,
    prompts: Sequence[str] | Prompts,
    *,
    options: GenerateOptions | None = None,
    address: str = "auto",
    on_count: OnCount | None = None,
) -> list[Answer]:
    """Continue each prompt by the newest checkpoint that ``uri`` names.

    Args:
        uri: URI of a run's folder, of one of its checkpoints or of a manifest.
        prompts: Texts, or files of them.
        options: Sampling, grid and folder; None takes the likeliest tokens, with transformers.
        address: Address of Ray for a grid: ``auto`` joins a running one or starts a local one; ``local``; ``HOST:PORT``.
        on_count: Function that is told a unit, how many of it are done, and of how many.

    Raises:
        ConfigError: The checkpoint, a prompt, the sampling or the grid is wrong; nothing was started.
        NumericsError: Logits are NaN or Inf.
        WorkerError: A worker failed.
        CapacityError: The cluster has no room for the grid.
    """
    given = prompts if isinstance(prompts, Prompts) else Prompts(texts=tuple(prompts))
    ready = prepare_generation(uri, given, options or GenerateOptions())
    return ready.run(address, on_count or (lambda _unit, _done, _total: None))


def end_ids(files: Mapping[str, bytes]) -> set[int]:
    """Return the tokens that end a text, by the files of a model: tokenizer, config.json, generation_config.json."""
    settings = json.loads(files.get(GENERATION_CONFIG, b"{}"))
    found = {special_ids(files).eos}
    for value in (carried_config(files).get("eos_token_id"), settings.get("eos_token_id")):
        found |= set(value) if isinstance(value, list) else {value}
    return {each for each in found if isinstance(each, int)}


def _row_length(num_tokens: int, grid: str) -> int:
    """Return a row length of at least ``num_tokens`` that the grid can cut."""
    degrees = degrees_of(grid)
    unit = 2 * degrees["cp"] * degrees["tp"]
    return -(-num_tokens // unit) * unit


def _vocabulary_faults(codec: TextCodec, plan: RunPlan) -> Iterator[Fault]:
    if codec.vocab_size > plan.job.model.vocab_size:
        yield Fault(
            fact=f"the model's tokenizer has {codec.vocab_size:,} tokens",
            rule=f"the model has a vocabulary of {plan.job.model.vocab_size:,}",
            remedy="train on a dataset that is prepared with the model's own tokenizer",
        )


def _length_faults(
    texts: Sequence[str], prompts: Sequence[Sequence[int]], most: int
) -> Iterator[Fault]:
    for number, (text, tokens) in enumerate(zip(texts, prompts, strict=True), start=1):
        if not 0 < len(tokens) < most:
            yield Fault(
                fact=f"prompt {number} ({text[:40]!r}) has {counted(len(tokens), 'token')}",
                rule=f"a prompt has at least 1 token, and the model reads at most {most} with the answer",
                remedy="shorten it" if tokens else "give a prompt with text",
            )
