"""Ranks that must hold the same weights, and whether they still have the same bits.

Replicas make equal updates from equal sums, so nothing ever brings weights back together that a network,
a memory or a kernel made differ. Each rank takes a digest of what it holds alike with others; one small
all-gather shows all digests to all ranks, which so decide alike. What is sharded out to one rank alone
has nobody to be compared with.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from raymega.errors import Fault, NumericsError, RollbackError
from raymega.parallel.comm.collectives import all_gather, rank_list
from raymega.plan.grid import Grid
from raymega.train.build import TrainingComponents

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**20
"""Elements that are widened to 64 bits at a time."""
PRIME = 1_000_003

SHARED = "weights that tensor-parallel ranks share"
DENSE = "weights of data-parallel replicas"
EXPERTS = "weights of experts' replicas"
KINDS = (DENSE, EXPERTS, SHARED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Ranks of one group do not have equal digests; ``odd`` are those that most others contradict."""

    what: str
    group: tuple[int, ...]
    odd: tuple[int, ...]


class DivergenceCheck:
    """Looks every ``elastic.replica_check_every`` steps, and before checkpoints; all ranks together."""

    def __init__(self, parts: TrainingComponents) -> None:
        self._parts, self._section = parts, parts.plan.job.elastic
        self._every = self._section.replica_check_every

    def check(self, step: int, *, is_saving: bool) -> dict[str, float]:
        """After ``step`` steps, when it is time or a checkpoint is about to be written.

        Returns:
            Metrics, if it looked.

        Raises:
            NumericsError: Some ranks differ.
        """
        if not self._every or not (is_saving or step % self._every == 0):
            return {}
        began_s = time.monotonic()
        device = self._parts.device
        mine = torch.stack([digest(held, device) for held in _held_alike(self._parts)])
        rows = all_gather(mine, self._parts.groups.world).view(-1, len(KINDS)).tolist()
        found = find_differences(rows, self._parts.plan.grid)
        if found:
            raise self._refusal(step, found)
        return {"train/divergence_check_s": time.monotonic() - began_s}

    def _refusal(self, step: int, found: Sequence[Difference]) -> NumericsError:
        policy = self._section.on_divergence
        kind = RollbackError if policy == "rollback" else NumericsError
        return kind(
            Fault(
                fact=f"after step {step}: {describe(found)}",
                rule="ranks that hold the same weights have the same bits; no checkpoint was written since",
                remedy="look at the memory and the network of that rank's node; on GPUs set "
                "run.deterministic to tell kernels that vary from faults",
            )
        )


@torch.no_grad()
def digest(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """64 bits that any single flipped bit in flat ``tensors`` changes; an int64 scalar on ``device``.

    Words are summed with odd factors by their place, modulo 2^64: a flipped bit adds a power of two times
    an odd number, which is never zero.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for flat in tensors:
        words = flat.detach().view(WORDS[flat.element_size()])
        factors = torch.arange(min(CHUNK, words.numel()), device=device).mul_(2).add_(1)
        for chunk in words.split(CHUNK):
            part = (chunk.long() * factors[: chunk.numel()]).sum()
            total = total * PRIME + part
    return total


def find_differences(rows: Sequence[Sequence[int]], grid: Grid) -> list[Difference]:
    """Groups whose ranks do not agree; ``rows`` are by rank the digests of KINDS."""
    found = []
    for place, what in enumerate(KINDS):
        for group in _groups(grid, what):
            values = [rows[rank][place] for rank in group]
            if len(set(values)) > 1:
                found.append(Difference(what=what, group=group, odd=_odd(group, values)))
    return found


def describe(found: Sequence[Difference]) -> str:
    """Who differs, in words: the ranks that most differences have in common, and where they show."""
    votes = Counter(rank for each in found for rank in each.odd)
    most = max(votes.values())
    named = sorted(rank for rank, count in votes.items() if count == most)
    who = (
        f"rank {named[0]} differs"
        if len(named) == 1
        else f"one of ranks {rank_list(named)} differs"
    )
    groups = "; ".join(f"{each.what}: ranks {rank_list(each.group)} disagree" for each in found[:4])
    return f"{who} from those that hold the same ({groups})"


def _held_alike(parts: TrainingComponents) -> Iterator[list[torch.Tensor]]:
    """In the order of KINDS."""
    parts.weights.wait_for_all()
    whole = list(parts.weights.whole())
    yield [flat for bucket, flat in whole if not bucket.is_expert]
    yield [flat for bucket, flat in whole if bucket.is_expert]
    yield [
        param.detach().reshape(-1)
        for bucket, _ in whole
        if not bucket.is_expert
        for param, _ in bucket.spans
        if all(piece.tensor.tp_dim < 0 for piece in param.spec.pieces)
    ]


def _groups(grid: Grid, what: str) -> Iterable[tuple[int, ...]]:
    """Each once, as ascending ranks."""
    found: Mapping[tuple[int, ...], None] = {
        tuple(sorted(_group_of(grid, what, rank))): None for rank in range(grid.world_size)
    }
    return [group for group in found if len(group) > 1]


def _group_of(grid: Grid, what: str, rank: int) -> tuple[int, ...]:
    if what == EXPERTS:
        return grid.expert_group("edp", rank)
    return grid.group("tp" if what == SHARED else ("cp", "dp"), rank)


def _odd(group: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    """The ranks outside of the majority; all where there is none."""
    (value, count), *_ = Counter(values).most_common()
    if 2 * count <= len(group):
        return tuple(group)
    return tuple(rank for rank, held in zip(group, values, strict=True) if held != value)
