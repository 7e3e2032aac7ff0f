"""What was done when: the events of a pipeline step, simulated or recorded, and their bubble.

It owns the form of an event and the measures of a time line. The simulator and the executor write
events; draw and trace show them.
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
"""From launch to completion: gradients over dp, those of experts over edp, over tp, over the copies of
hybrid sharding and over the two stages of a tied table; weights over dp, those of experts over edp.
``wait_`` before the name is the time that the step stood still for one."""
BETWEEN_CP = frozenset({"cp_pass", "cp_gather", "cp_reduce", "cp_exchange"})
"""The same between context-parallel ranks: keys, values and the gradients by them go round, are
collected, are summed; heads are exchanged."""
BETWEEN_EXPERTS = frozenset({"ep_exchange", "ep_gather", "ep_reduce", "etp_gather", "etp_reduce"})
"""The same between the ranks that hold experts: tokens travel to them and back, or are collected and
summed; ranks that hold parts of the same experts see one another's tokens and sum what they made."""
IN_UPDATE = frozenset({"matrix_exchange", "scale_reduce"})
"""The same in the update: matrices that Muon needs whole come together and go back, and largest magnitudes
of blocks of 8-bit state are taken over the ranks that cut them."""
TRANSFERS = BETWEEN_CP | BETWEEN_EXPERTS | IN_UPDATE
COLLECTIVES = SUMS_AND_WEIGHTS | TRANSFERS
WAITS = frozenset(f"wait_{name}" for name in COLLECTIVES)

EventTuple = tuple[str, int, int, float, float]


class Event(NamedTuple):
    """One instruction carried out; equal to its plain tuple, which is how it crosses processes.

    ``name`` is the op's value. Times are seconds since the step's start, or the simulator's units.
    Collectives are events too: ``name`` is one of COLLECTIVES or WAITS, and ``micro_batch`` the
    number of the bucket, or that of the transfer in the step.
    """

    name: str
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float


class Bubble(NamedTuple):
    """Idle time of all ranks together: ``ratio`` to their working time, ``rate`` of all time."""

    ratio: float
    rate: float


class Overlap(NamedTuple):
    """How much of the collectives' time went by beside work.

    ``exposed_s`` is the mean over ranks of the time that a step stood still for them;
    ``hidden_share`` the rest's share of the time in which any was under way.
    """

    exposed_s: float
    hidden_share: float


def span(rows: Iterable[Sequence[EventTuple]]) -> tuple[float, float]:
    """First start and last end of any event; (0, 0) when there is none."""
    events = [event for row in rows for event in row]
    if not events:
        return 0.0, 0.0
    return min(event[3] for event in events), max(event[4] for event in events)


def bubble(rows: Collection[Sequence[EventTuple]]) -> Bubble:
    """Idle time within a step; receiving and waiting are idle.

    A rank's step lasts from its first forward to its last backward or weight part, and all ranks
    are charged with the longest. That is the papers' measure: a step costs as much as its slowest
    rank, and ranks that only start later than others, as in ZB-H2, lose nothing.
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
    """What collectives of ``names`` cost; None when there were none."""
    under_way = sum(_covered(row, names) for row in rows)
    if under_way == 0:
        return None
    exposed = sum(_covered(row, {f"wait_{name}" for name in names}) for row in rows)
    return Overlap(exposed / len(rows), max(0.0, 1 - exposed / under_way))


def _covered(row: Sequence[EventTuple], names: Collection[str]) -> float:
    """Time during which at least one event of ``names`` went on."""
    total, end = 0.0, float("-inf")
    for start_s, end_s in sorted(event[3:] for event in row if event[0] in names):
        total += max(0.0, end_s - max(start_s, end))
        end = max(end, end_s)
    return total
