"""Shrinking of a job's data: datasets that can be read here, and a blend that changes while it trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import Any

from raymega.config.data import NO_PATH, SYNTHETIC_PATH, is_computed, is_synthetic
from raymega.config.schema import Job
from raymega.data.megatron import is_megatron
from raymega.data.streaming.remote_dataset import meta_at
from raymega.data.synthetic import SHARD_WINDOWS, SYNTHETIC_VOCAB_SIZE
from raymega.errors import RaymegaError
from raymega.plan.layers.family_parts import parts_of


def small_datasets(
    job: Job, small: Job, *, is_data_there: bool
) -> Iterator[tuple[str, object, str]]:
    """Yield field, new value and reason of each change by which the ``small`` job can read its datasets.

    Synthetic tokens take the place of datasets that it cannot read; a blend stays a blend.
    """
    named = [each.path for each in job.data.validation]
    is_real = not all(map(is_synthetic, (*job.data.datasets, *named)))
    vocab_size, why = small.model.vocab_size, ""
    if is_real and not is_data_there:
        why = "it cannot be read from here"
    elif is_real and vocab_size != job.model.vocab_size:
        why = "its tokens need the whole vocabulary"
    elif job.data.packing != "none" and small.data.seq_len != job.data.seq_len:
        why = "its documents would fill every shorter row alone"
    elif is_real and job.preference.needs_reference and job.preference.reference == "stored":
        why = "its stored reference is of the job's own rows"
    elif is_real and job.distillation.is_on and not job.distillation.is_live:
        why = "the stored logits of its teacher are of the job's own rows"
    if why:
        yield from _synthetic(job, small, why, is_data_there=is_data_there)
    if (why or not is_real) and vocab_size < SYNTHETIC_VOCAB_SIZE:
        yield "model.vocab_size", SYNTHETIC_VOCAB_SIZE, "the synthetic tokens need it"
    if (why or not is_real) and job.preference.is_on:
        yield "data.loss_on", "all", "both answers of few synthetic pairs have another label"


def _synthetic(
    job: Job, small: Job, why: str, *, is_data_there: bool
) -> Iterator[tuple[str, object, str]]:
    """Yield the changes that put synthetic tokens in the place of the job's datasets."""
    # the datasets of a blend stay different ones
    paths = {path: f"{SYNTHETIC_PATH}:{number}" for number, path in enumerate(job.data.datasets)}
    if len(paths) == 1:
        paths = dict.fromkeys(paths, SYNTHETIC_PATH)
    if not job.data.sources:
        yield "data.path", paths[job.data.path], why
    data = small.model_dump()["data"]
    for field in ("sources", "stages"):
        if data[field]:
            yield f"data.{field}", _with_paths(data[field], paths), why
    # named sets stay as many, each with tokens of its own
    if sets := data["validation"]:
        own = {each["path"]: f"{SYNTHETIC_PATH}:valid-{number}" for number, each in enumerate(sets)}
        yield "data.validation", _with_paths(sets, own), why
    is_auto = job.data.loss_on == "auto" and not (job.preference.is_on or job.model.head.is_on)
    if is_data_there and is_auto and any(map(_has_answers, paths)):
        yield "data.loss_on", "assistant", "synthetic conversations take their place"


def drawn_blend(job: Job, seed: int) -> Iterator[tuple[str, object, str]]:
    """Yield field, new value and reason of the changes that make a blend of a job's synthetic tokens.

    A job with a dataset that can be read keeps it, and one with a blend or stages keeps these. The blend
    has two or three datasets, and a stage with one more and other weights begins in the second batch.
    """
    if job.data.sources or job.data.stages or not is_synthetic(job.data.path):
        return
    random, why = Random(f"{seed}/blend"), "drawn, so that blends and stages are tested"
    number = random.randint(2, 3)

    def blend(names: Iterable[int]) -> tuple[dict[str, Any], ...]:
        return tuple(
            {"path": f"{SYNTHETIC_PATH}:{name}", "weight": random.randint(1, 9)} for name in names
        )

    sample = job.data.global_batch_size + random.randint(1, job.data.global_batch_size)
    stage = {
        "from_tokens": sample * job.data.seq_len,
        "sources": blend(random.sample(range(number + 1), number)),
    }
    yield "data.sources", blend(range(number)), why
    yield "data.stages", (stage,), why
    yield "data.path", NO_PATH, why
    family = parts_of(job.model)
    is_decoder = family.is_causal and not family.is_encoder_decoder
    has_others = job.preference.is_on or job.model.head.is_on
    has_labels_of_answers = is_decoder and not has_others
    if job.data.loss_on == "auto" and has_labels_of_answers:
        loss_on = random.choice(("all", "assistant", "completion"))
        yield "data.loss_on", loss_on, "drawn, so that labels that do not count are tested"


def drawn_blocks(job: Job, seed: int) -> Iterator[tuple[str, object, str]]:
    """Yield the change that cuts the shards of a job's synthetic tokens into small blocks, in one of two draws."""
    if all(map(is_synthetic, job.data.datasets)) and Random(f"{seed}/blocks").random() < 0.5:
        size = SHARD_WINDOWS * job.data.seq_len
        yield "data.shuffle_block_bytes", size, "drawn, so that the borders of blocks are tested"


def _has_answers(path: str) -> bool:
    if is_computed(path) or is_megatron(path):
        return False
    try:
        return meta_at(path).has_targets
    except RaymegaError:  # none that can be read
        return False


def _with_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """Return entries of a blend or of stages with other paths."""
    if isinstance(value, tuple):
        return tuple(_with_paths(entry, paths) for entry in value)
    if not isinstance(value, dict):
        return value
    found = {key: _with_paths(inner, paths) for key, inner in value.items()}
    return found | ({"path": paths[value["path"]]} if "path" in value else {})


def short_ramp(job: Job) -> tuple[dict[str, int], ...]:
    """Return a ramp of one step with half the batch if the job has a ramp, so that the size changes."""
    half = job.data.global_batch_size // 2
    if not job.data.batch_ramp or half == 0:
        return ()
    return ({"until_samples": half, "global_batch_size": half},)


def early_stages(job: Job) -> tuple[dict[str, Any], ...]:
    """Return the job's stages, the last of them from the middle of the first small batch on.

    Each begins one sequence after the one before, so that all are reached.
    """
    stages, half = job.data.stages, job.data.global_batch_size // 2
    first = max(1, half - len(stages) + 1)
    return tuple(
        stage.model_dump() | {"from_tokens": (first + number) * job.data.seq_len}
        for number, stage in enumerate(stages)
    )
