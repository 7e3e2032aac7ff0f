"""Check the rules of datasets: blends, stages and validation sets, as far as the job file alone decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

from raymega.config.data import NO_PATH, DataSource, DataStage, ValidationSet
from raymega.errors import Fault
from raymega.plan.validation.rule import reads

LEAST_SHARE = Fraction(1, 1 << 20)
"""Least share of a dataset in a blend: the order of samples is computed in blocks of 1 / share."""


@reads("data.path sources stages")
def source_faults(
    path: str, sources: Sequence[DataSource], stages: Sequence[DataStage]
) -> Iterator[Fault]:
    """Check that the job has one dataset or one blend, and that each blend's entries are sound."""
    if path == NO_PATH and not sources:
        yield Fault(
            fact=f"data.path={NO_PATH} and data.sources=[]",
            rule="a job trains on one dataset or on a blend",
            remedy="set data.path, or data.sources=[{path: A, weight: 0.7}, {path: B, weight: 0.3}]",
        )
    if path != NO_PATH and sources:
        yield Fault(
            fact=f"data.path={path!r} with {len(sources)} data.sources",
            rule="a job trains on one dataset or on a blend",
            remedy=f"remove data.path, or data.sources; entry {{path: {path}}} adds it to the blend",
        )
    yield from _blend_faults("data.sources", sources)
    for number, stage in enumerate(stages):
        yield from _blend_faults(f"data.stages[{number}].sources", stage.sources)


def _blend_faults(field: str, sources: Sequence[DataSource]) -> Iterator[Fault]:
    # each dataset once
    for path, times in Counter(source.path for source in sources).items():
        if times > 1:
            yield Fault(
                fact=f"{field} has path={path!r} {times} times",
                rule="a blend has each dataset once: two entries would read the same samples",
                remedy="make them one entry with the sum of the weights",
            )
    # no share too small to be computed
    exact = [Fraction(str(source.weight)) for source in sources]
    total = sum(exact)
    for number, weight in enumerate(exact):
        if weight < LEAST_SHARE * total:
            least = float(LEAST_SHARE * (total - weight) / (1 - LEAST_SHARE))
            yield Fault(
                fact=f"{field}[{number}].weight={float(weight):g}",
                rule=f"a share of {float(weight / total):.2e} is below 1 in {int(1 / LEAST_SHARE):,} samples",
                remedy=f"use a weight of {least:.3g} or more, or remove the entry",
            )


@reads("data.stages seq_len")
def stage_faults(stages: Sequence[DataStage], seq_len: int) -> Iterator[Fault]:
    """Check that the stages are in order, each of at least one sequence."""
    for number, (one, other) in enumerate(pairwise(stages), start=1):
        if -(-other.from_tokens // seq_len) <= -(-one.from_tokens // seq_len):
            yield Fault(
                fact=f"data.stages[{number}].from_tokens={other.from_tokens}",
                rule=f"the stage before it begins at {one.from_tokens} and has one sequence of "
                f"data.seq_len={seq_len} at least",
                remedy=f"order the stages; use {one.from_tokens + seq_len} or more",
            )


@reads("data.validation")
def validation_faults(sets: Sequence[ValidationSet]) -> Iterator[Fault]:
    """Check that each validation set has a name of its own."""
    for name, times in Counter(entry.name for entry in sets).items():
        if times > 1:
            yield Fault(
                fact=f"data.validation has name={name} {times} times",
                rule="metrics are reported by the name of the set",
                remedy="give each set a name of its own",
            )
