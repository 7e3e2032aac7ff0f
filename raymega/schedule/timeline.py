"""Events of a pipeline step, simulated or recorded, and the measures of its time line.

It owns the form of an event, the bubble and the overlap. `raymega.schedule.simulate` and
`raymega.pipeline.executor` write events; `raymega.schedule.timeline_svg` and
`raymega.schedule.trace` show them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from raymega.schedule.instructions import COMPUTE

SUMS_AND_WEIGHTS = frozenset(
    {
        "reduce",
        "reduce_experts",
        "sum_partial",
        "sum_copies",
        "sum_tied",
        "gather",
        "gather_experts",
    }
)
"""Collectives of gradients and weights, from launch to completion.

Gradients are summed over dp, those of experts over edp, and over tp, the copies of hybrid sharding
and the two stages of a tied table. Weights are gathered over dp, those of experts over edp.
``wait_`` before the name marks the time for which the step stalled on one."""
BETWEEN_CP = frozenset({"cp_pass", "cp_gather", "cp_reduce", "cp_exchange"})
"""Collectives between context-parallel ranks: keys, values and their gradients are passed around
the ring, gathered and reduced; heads are exchanged."""
BETWEEN_EXPERTS = frozenset({"ep_exchange", "ep_gather", "ep_reduce", "etp_gather", "etp_reduce"})
"""Collectives between the ranks that hold experts.

Tokens are sent to the experts and back (ep_exchange), or gathered and reduced. Ranks that hold
parts of the same experts gather one another's tokens and reduce their outputs (etp)."""
IN_UPDATE = frozenset({"matrix_exchange", "scale_reduce"})
"""Collectives in the optimizer's update.

Matrices that Muon needs whole are collected and sent back. Largest magnitudes of the blocks of
8-bit state are reduced over the ranks that share a block."""
TRANSFERS = BETWEEN_CP | BETWEEN_EXPERTS | IN_UPDATE
COLLECTIVES = SUMS_AND_WEIGHTS | TRANSFERS
WAITS = frozenset(f"wait_{name}" for name in COLLECTIVES)

EventTuple = tuple[str, int, int, float, float]


class Event(NamedTuple):
    """Executed instruction; equal to its plain tuple, as which it is sent between processes.

    ``name`` is the op's value. Times are seconds since the step's start, or the simulator's units.
    Collectives are events too: ``name`` is one of COLLECTIVES or WAITS, and ``micro_batch`` the
    number of the bucket, or the number of the transfer in the step.
    """

    name: str
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float


class Bubble(NamedTuple):
    """Idle time of all ranks together: ``ratio`` to their working time, ``rate`` to total time."""

    ratio: float
    rate: float


class Overlap(NamedTuple):
    """Overlap of collectives with compute.

    ``exposed_s`` is the time for which a step stalled on collectives, as the mean over ranks.
    ``hidden_share`` is the remaining share of the time in which any collective was in progress.
    """

    exposed_s: float
    hidden_share: float


def span(rows: Iterable[Sequence[EventTuple]]) -> tuple[float, float]:
    """Return the first start and last end of any event; (0, 0) when there is none."""
    events = [event for row in rows for event in row]
    if not events:
        return 0.0, 0.0
    return min(event[3] for event in events), max(event[4] for event in events)


def bubble(rows: Collection[Sequence[EventTuple]]) -> Bubble:
    """Return the idle time within a step; receiving and waiting count as idle.

    A rank's step lasts from its first forward to its last backward or weight part, and all ranks
    are charged with the longest. This is the measure of the zero-bubble papers: a step costs as
    much as its slowest rank. Ranks that only start later than others, as in ZB-H2, lose nothing.
    """
    work = [[event for event in row if event[0] in COMPUTE] for row in rows]
    busy = sum(end - start for row in work for *_, start, end in row)
    if busy == 0:
        return Bubble(0.0, 0.0)
    longest = max(last - first for first, last in (span([row]) for row in work))
    total = len(rows) * longest
    return Bubble(ratio=(total - busy) / busy, rate=(total - busy) / total)


def overlap(
    rows: Collection[Sequence[EventTuple]], names: Collection[str] = SUMS_AND_WEIGHTS
) -> Overlap | None:
    """Return the overlap of the collectives ``names`` with compute; None when there were none."""
    under_way = sum(_covered(row, names) for row in rows)
    if under_way == 0:
        return None
    exposed = sum(_covered(row, {f"wait_{name}" for name in names}) for row in rows)
    return Overlap(exposed / len(rows), max(0.0, 1 - exposed / under_way))


def _covered(row: Sequence[EventTuple], names: Collection[str]) -> float:
    """Return the time during which at least one event of ``names`` was in progress."""
    total, end = 0.0, float("-inf")
    # Union of intervals: each adds only its time after the latest end so far.
    for start_s, end_s in sorted(event[3:] for event in row if event[0] in names):
        total += max(0.0, end_s - max(start_s, end))
        end = max(end, end_s)
    return total
