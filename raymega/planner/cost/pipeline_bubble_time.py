"""Seconds that a step of a pipeline takes beside the work of its busiest rank, by closed forms.

What is waited for in the order of a schedule is fill_time's; here it is priced, for ranks that need not
take equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raymega.planner.cost.pipeline_critical_path import Path, own_paths, waiting_paths


class Passes(NamedTuple):
    """Seconds of one micro-batch through all chunks of a rank."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.forward_s + self.input_s + self.weight_s

    def plus(self, more: Passes) -> Passes:
        """With so much more of each."""
        return Passes(*(mine + other for mine, other in zip(self, more, strict=True)))

    def along(self, path: Path) -> float:
        """So many of them, less messages."""
        return (
            path.forwards * self.forward_s
            + path.inputs * self.input_s
            + path.weights * self.weight_s
        )

    def left(self, path: Path) -> float:
        """What of a rank's own is not on its path."""
        backward_s = self.input_s + self.weight_s
        return path.left_forwards * self.forward_s + path.left_backwards * backward_s


class RankTimes(NamedTuple):
    """Ranks of one kind, the first and the last of them, and what each of them does."""

    pp_ranks: tuple[int, ...]
    passes: Passes


def waiting_s(  # noqa: PLR0913  # one a size
    name: str,
    *,
    chunks: int,
    num_micro_batches: int,
    ranks: Sequence[RankTimes],
    mean: Passes,
    pp: int,
    message_s: float,
) -> tuple[float, float]:
    """For passes of other ranks, and for messages.

    The longest path goes through all ranks alike; or through all that one of them does, which the others
    wait for, and through as much of theirs as this one waits for.

    Args:
        name: Of the schedule.
        chunks: Of a rank.
        num_micro_batches: Of the step.
        ranks: All kinds of them.
        mean: Of all ranks.
        pp: How many these are.
        message_s: One activation of all chunks from one rank to the next.
    """
    num = num_micro_batches
    paths = waiting_paths(name, pp=pp, chunks=chunks, num_micro_batches=num)
    alike_s, longest = num * mean.total_s, (0.0, 0.0)
    for wait_s, messages_s in _priced(paths, mean, chunks, message_s):
        longest = max(longest, (alike_s + wait_s, messages_s))
    for pp_ranks, passes in ranks:
        others, own_s = _others(mean, passes, pp), num * passes.total_s
        for pp_rank in pp_ranks:
            paths = own_paths(name, pp=pp, pp_rank=pp_rank, chunks=chunks, num_micro_batches=num)
            priced = _priced(paths, others, chunks, message_s)
            for path, (wait_s, messages_s) in zip(paths, priced, strict=True):
                longest = max(longest, (own_s - passes.left(path) + wait_s, messages_s))
    busiest_s = num * max(rank.passes.total_s for rank in ranks)
    waits_s = max(0.0, longest[0] - busiest_s)
    messages_s = min(waits_s, longest[1])
    return waits_s - messages_s, messages_s


def _priced(
    paths: Sequence[Path], passes: Passes, chunks: int, message_s: float
) -> list[tuple[float, float]]:
    """Seconds of each, and what of them is messages."""
    return [
        ((passes.along(path) + path.messages * message_s) / chunks,
         path.messages * message_s / chunks)
        for path in paths
    ]  # fmt: skip


def _others(mean: Passes, mine: Passes, pp: int) -> Passes:
    """The mean of all ranks but one."""
    if pp == 1:
        return mean
    return Passes(
        *((pp * all_s - own_s) / (pp - 1) for all_s, own_s in zip(mean, mine, strict=True))
    )
