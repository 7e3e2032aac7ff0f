"""Counts the epochs of a run's datasets: limits of a blend, and a run's length given in epochs or tokens.

It reads descriptions of datasets, and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from raymega.config.data import MEGATRON, DataSection, is_computed
from raymega.config.fields import MOST
from raymega.config.schema import Job, PluginsSection
from raymega.data.blends.mixture import mixture_of
from raymega.data.heads.form import form_of_values, job_form
from raymega.data.megatron import MegatronStream, is_megatron
from raymega.data.open_split import open_split, shape_of
from raymega.data.order import two_blocks_bytes
from raymega.data.rows import TEXTS, RowForm
from raymega.data.streaming.remote_dataset import is_remote, meta_at
from raymega.errors import Fault, RaymegaError
from raymega.plan.batch import samples_after, steps_for


def epoch_faults(
    section: DataSection,
    *,
    seed: int,
    num_samples: int,
    plugins: PluginsSection,
    form: RowForm = TEXTS,
) -> Iterator[Fault]:
    """Yield a fault for each dataset that the run would read more often than its ``max_epochs``."""
    limits = [source.max_epochs for _, sources in section.blends for source in sources]
    if not any(limits):
        return
    mixture, count = mixture_of(section), partial(num_rows, plugins=plugins, form=form)
    for (_, sources), first, end in zip(
        section.blends, mixture.firsts, [*mixture.firsts[1:], num_samples], strict=True
    ):
        until = min(end, num_samples)
        if first >= until:
            continue
        counts = dict(zip(mixture.datasets, mixture.counts(until), strict=True))
        for source in sources:
            rows = count(source.path, section, seed=seed) if source.max_epochs else 0
            if rows and counts[source.path] > source.max_epochs * rows:
                yield Fault(
                    fact=f"{section.datasets[source.path]}={source.path!r} is read "
                    f"{counts[source.path] / rows:.3g} times in the run's first {until:,} samples",
                    rule=f"its max_epochs={source.max_epochs:g}, and it has {rows:,} sequences of "
                    f"data.seq_len={section.seq_len}",
                    remedy="give it a smaller weight or a larger max_epochs, or train fewer steps",
                )


def num_rows(
    path: str,
    section: DataSection,
    *,
    seed: int,
    plugins: PluginsSection,
    form: RowForm = TEXTS,
) -> int:
    """Return the sequences of one epoch of a training dataset, of texts or of pairs; reads no tokens.

    Documents in an object store are not packed for it: the number of rows is then a lower bound; of conversations and
    pairs, which lose what is beyond a row, at most one a document or pair.
    """
    is_packed = section.packing != "none"
    if is_computed(path) or is_megatron(path) or (is_packed and not is_remote(path)):
        shape = replace(shape_of(section), form=form)
        return open_split(path, "train", shape, seed=seed, plugins=plugins).num_windows
    meta, seq_len = meta_at(path), section.text_len
    shards = meta.splits["train"].shards
    if is_packed:
        rows = sum(-(-shard.num_tokens // seq_len) for shard in shards)
        whole = meta.splits["train"].num_documents // max(1, form.size)
        return min(rows, whole) if meta.has_targets else rows
    return sum((shard.num_tokens - 1) // seq_len for shard in shards)


def budget_steps(values: Mapping[str, Any]) -> tuple[int, list[Fault]]:
    """Return the steps of a run whose length is ``run.tokens`` or ``run.epochs``; 0 for any other.

    The faults say why the steps of ``run.epochs`` are unknown: a blend, or a dataset that cannot be read.

    Args:
        values: Fields of the job that are valid, by dotted path.
    """
    tokens, epochs = values.get("run.tokens", 0), values.get("run.epochs", 0.0)
    fields = {
        name: values.get(f"data.{name}")
        for name in (
            "path",
            "sources",
            "stages",
            "seq_len",
            "global_batch_size",
            "batch_ramp",
            "packing",
        )
    }
    # other faults come first
    if not (tokens or epochs) or None in fields.values():
        return 0, []
    section = DataSection.model_construct(
        **{
            name: values[f"data.{name}"]
            for name in DataSection.model_fields
            if f"data.{name}" in values
        }
    )
    if tokens:
        return steps_for(-(-tokens // section.seq_len), section), []
    if section.sources or section.stages:
        return 0, [_no_epoch(epochs)]
    try:
        plugins = PluginsSection(options=values.get("plugins.options", {}))
        form, seed = form_of_values(values), values.get("run.seed", 0)
        rows = num_rows(section.path, section, seed=seed, plugins=plugins, form=form)
    except RaymegaError as error:
        return 0, [_unread(epochs, section.path, str(error))]
    if epochs * rows > MOST:
        return 0, [_too_long(epochs, rows)]
    steps, given = steps_for(ceil(epochs * rows), section), values.get("run.steps", 0)
    return steps, [_two_lengths(epochs, given, steps)] if given not in (0, steps) else []


def _too_long(epochs: float, rows: int) -> Fault:
    return Fault(
        fact=f"run.epochs={epochs:g}",
        rule=f"an epoch has {rows:,} sequences, and a run reads at most {MOST:,}",
        remedy=f"use at most {MOST // rows:,} epochs",
    )


def _two_lengths(epochs: float, given: int, steps: int) -> Fault:
    return Fault(
        fact=f"run.steps={given} with run.epochs={epochs:g}",
        rule=f"the run's length is given once, and these epochs are {steps:,} steps",
        remedy="remove run.steps, or set run.epochs=0",
    )


def _no_epoch(epochs: float) -> Fault:
    return Fault(
        fact=f"run.epochs={epochs:g} with a blend",
        rule="the datasets of a blend have epochs of different lengths",
        remedy="set run.tokens; `raymega plan` shows the epochs of each dataset",
    )


def _unread(epochs: float, path: str, why: str) -> Fault:
    return Fault(
        fact=f"run.epochs={epochs:g} and data.path={path!r} cannot be read here ({why})",
        rule="the number of steps follows from the size of the dataset",
        remedy="run the command where the dataset is, or set run.tokens",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetUse:
    """Samples, tokens and epochs that a run reads of a dataset in one stage of its data.

    Attributes:
        first_sample: First sample of the stage.
        dataset: Path of the dataset.
        weight: Share of the stage's samples.
        samples: Samples of the dataset in the stage.
        tokens: Tokens of these samples, padding included.
        epochs: Passes over the dataset from the begin of the run to the end of the stage; None where the
            dataset cannot be read here.
    """

    first_sample: int
    dataset: str
    weight: float
    samples: int
    tokens: int
    epochs: float | None


def planned_reads(job: Job) -> list[DatasetUse]:
    """Return what the whole run reads of each dataset, stage by stage; reads no tokens."""
    section = job.data
    mixture, num_samples = mixture_of(section), samples_after(job.run.steps, section)
    rows = {path: _known_rows(path, job) for path in mixture.datasets}
    # stages that the run reaches, each with its end
    ends = [*mixture.firsts[1:], num_samples]
    found = []
    for (_, sources), first, end in zip(section.blends, mixture.firsts, ends, strict=True):
        until = min(end, num_samples)
        if first >= until:
            break
        counts = dict(zip(mixture.datasets, mixture.counts(until), strict=True))
        before = dict(zip(mixture.datasets, mixture.counts(first), strict=True))
        total = sum(source.weight for source in sources)
        for source in sources:
            samples, size = counts[source.path] - before[source.path], rows[source.path]
            found.append(
                DatasetUse(
                    first_sample=first,
                    dataset=source.path,
                    weight=source.weight / total,
                    samples=samples,
                    tokens=samples * section.seq_len,
                    epochs=counts[source.path] / size if size else None,
                )
            )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedReads:
    """Cost of datasets in object stores, for each node.

    Attributes:
        cached_bytes: Most bytes of shards on its disk that are needed at one time.
        step_bytes: Bytes that a step takes of all shards, on average over the first blend. Each node fetches
            them all: the rows of a block are dealt to all ranks.
    """

    cached_bytes: int
    step_bytes: int


def streamed_reads(job: Job) -> StreamedReads | None:
    """Return the cost of datasets in object stores; None without one that can be read here."""
    section = job.data
    try:
        splits = read_splits(section, is_evaluating=job.run.eval_samples > 0)
        need = sum(cache_need(path, split, section) for path, split in splits)
        if not need:
            return None
        step_bytes = 0.0
        for path, share in zip(
            mixture_of(section).datasets, mixture_of(section).shares(), strict=True
        ):
            if is_remote(path):
                sizes = _shard_bytes(path, "train")
                form, seed = job_form(job), job.run.seed
                rows = num_rows(path, section, seed=seed, plugins=job.plugins, form=form)
                step_bytes += float(share) * section.global_batch_size * sum(sizes) / rows
    except (RaymegaError, KeyError):
        return None
    return StreamedReads(cached_bytes=need, step_bytes=ceil(step_bytes))


def read_splits(section: DataSection, *, is_evaluating: bool) -> list[tuple[str, str]]:
    """Return the datasets that a run reads, each with the split, once."""
    splits = [(path, "train") for path in section.datasets]
    if is_evaluating:
        named = [(entry.path, entry.split) for entry in section.validation]
        splits += named or [(source.path, "valid") for source in section.blends[0][1]]
    return [*dict.fromkeys(splits)]


def cache_need(path: str, split: str, section: DataSection) -> int:
    """Return the bytes that a node keeps of a split in an object store: two blocks, or all; 0 for others."""
    if not is_remote(path):
        return 0
    return two_blocks_bytes(np.array(_shard_bytes(path, split)), section.shuffle_block_bytes)


def _shard_bytes(path: str, split: str) -> list[int]:
    """Return the bytes of each shard of a split in an object store."""
    if is_megatron(path):
        return [shard.num_bytes for shard in MegatronStream(path.removeprefix(MEGATRON)).shards]
    return [shard.num_bytes for shard in meta_at(path).splits[split].shards]


def _known_rows(path: str, job: Job) -> int:
    """Return the sequences of a dataset; 0 where it cannot be read here."""
    try:
        form, seed = job_form(job), job.run.seed
        return num_rows(path, job.data, seed=seed, plugins=job.plugins, form=form)
    except (RaymegaError, KeyError):
        return 0
