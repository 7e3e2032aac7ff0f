"""Bitwise comparison of weights between ranks that must hold the same ones.

Replicas make equal updates from equal sums, so a difference that a network, memory or kernel fault made
stays for good. Each rank takes a digest of its replicated weights. One small all-gather shows all digests
to all ranks, so all decide alike. Weights that are sharded to one rank alone cannot be compared.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from raymega.errors import Fault, NumericsError, RollbackError
from raymega.parallel.comm.collectives import all_gather, rank_list
from raymega.parallel.comm.world import raise_if_aborted
from raymega.plan.grid import Grid
from raymega.train.build import TrainingComponents

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**20
"""Elements that are widened to 64 bits at a time; bounds the memory of a digest."""
PRIME = 1_000_003

SHARED = "weights that tensor-parallel ranks share"
DENSE = "weights of data-parallel replicas"
EXPERTS = "weights of experts' replicas"
KINDS = (DENSE, EXPERTS, SHARED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Group of ranks with unequal digests; ``odd`` are those outside the majority."""

    what: str
    group: tuple[int, ...]
    odd: tuple[int, ...]


class DivergenceCheck:
    """Check that all ranks make together, every ``replica_check_every`` steps and before a save."""

    def __init__(self, parts: TrainingComponents) -> None:
        self._parts, self._section = parts, parts.plan.job.elastic
        self._every = self._section.replica_check_every

    def check(self, step: int, *, is_saving: bool) -> dict[str, float]:
        """Compare replicas after ``step`` steps, if the check is due or a checkpoint follows.

        Returns:
            Duration of the check by metric name; empty when none was due.

        Raises:
            NumericsError: Replicas differ; RollbackError under ``on_divergence=rollback``.
        """
        if not self._every or not (is_saving or step % self._every == 0):
            return {}
        began_s = time.monotonic()
        device = self._parts.device
        # One row a rank, one digest a kind of weights.
        mine = torch.stack([digest(held, device) for held in _held_alike(self._parts)])
        rows = all_gather(mine, self._parts.groups.world).view(-1, len(KINDS)).tolist()
        raise_if_aborted("the digests of all replicas")
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
    """Return a 64-bit digest of flat ``tensors``, an int64 scalar that any flipped bit changes.

    It is the sum of words times odd factors that depend on their place, modulo 2^64. A flipped bit adds
    a power of two times an odd number, which is never zero.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for flat in tensors:
        words = flat.detach().view(WORDS[flat.element_size()])
        factors = torch.arange(min(CHUNK, words.numel()), device=device).mul_(2).add_(1)
        for chunk in words.split(CHUNK):
            part = (chunk.long() * factors[: chunk.numel()]).sum()
            # PRIME makes the order of chunks and tensors count.
            total = total * PRIME + part
    return total


def find_differences(rows: Sequence[Sequence[int]], grid: Grid) -> list[Difference]:
    """Return the groups whose ranks disagree; ``rows`` holds each rank's digests of KINDS."""
    found = []
    for place, what in enumerate(KINDS):
        for group in _groups(grid, what):
            values = [rows[rank][place] for rank in group]
            if len(set(values)) > 1:
                found.append(Difference(what=what, group=group, odd=_odd(group, values)))
    return found


def describe(found: Sequence[Difference]) -> str:
    """Describe in words which rank is to blame: the one that occurs in most differences."""
    # A faulty rank is odd in several of its groups, its innocent peers in one each.
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
    """Yield flat tensors that this rank holds in common with others, in the order of KINDS."""
    parts.weights.wait_for_all()
    whole = list(parts.weights.whole())
    # SHARED: uncut over tp, such as norms; a bucket's flat tensor mixes them with cut ones.
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
    """Return each group of two or more ranks once, its ranks ascending."""
    found: Mapping[tuple[int, ...], None] = {
        tuple(sorted(_group_of(grid, what, rank))): None for rank in range(grid.world_size)
    }
    return [group for group in found if len(group) > 1]


def _group_of(grid: Grid, what: str, rank: int) -> tuple[int, ...]:
    if what == EXPERTS:
        return grid.expert_group("edp", rank)
    return grid.group("tp" if what == SHARED else ("cp", "dp"), rank)


def _odd(group: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks outside the majority, or all ranks where there is no majority."""
    (value, count), *_ = Counter(values).most_common()
    if 2 * count <= len(group):
        return tuple(group)
    return tuple(rank for rank, held in zip(group, values, strict=True) if held != value)
