"""Simulates the lists of all ranks on an abstract machine with given durations.

The machine keeps the contract of `raymega.pipeline.executor`: a rank works through its list in
order, a send never waits, a receive waits for the matching send. No real machine is measured.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from raymega.errors import Fault, InternalError, raise_faults
from raymega.schedule.instructions import COMPUTE, RECEIVE, SEND, Instruction, Op, Schedule
from raymega.schedule.stage_placement import Message, Placement, Program
from raymega.schedule.timeline import Event, bubble, span


class Times(Protocol):
    """Durations of the machine's work: the same for every rank, or as recorded."""

    @property
    def transfer(self) -> float:
        """Time from a send to its arrival on another rank; both ranks may work meanwhile."""

    @property
    def handling(self) -> float:
        """Time for which a send or a receive occupies its rank."""

    def of_task(self, rank: int, task: Instruction) -> float:
        """Return the time for which a forward, a backward or a part of one occupies ``rank``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """Times of one stage's passes and of one message, all in one arbitrary unit.

    Attributes:
        forward: Time of a forward.
        backward: Time of a whole backward.
        weight: Time of the weight part of a backward; the rest of ``backward`` is the input part.
        transfer: Time from a send to its arrival on another rank; both ranks may work meanwhile.
        handling: Time for which a send or a receive occupies its rank.
    """

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0
    transfer: float = 0.0
    handling: float = 0.0

    def of(self, op: Op) -> float:
        """Return the time for which the compute operation ``op`` occupies its rank."""
        return {
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward,
            Op.BACKWARD_INPUT: self.backward - self.weight,
            Op.BACKWARD_WEIGHT: self.weight,
        }[op]

    def of_task(self, rank: int, task: Instruction) -> float:  # noqa: ARG002
        """Return the time of the task's op, the same for every rank and micro-batch."""
        return self.of(task.op)


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Result of a simulation: the events of each rank, in the order of its list."""

    events: tuple[tuple[Event, ...], ...]

    @property
    def time(self) -> float:
        """Time from the first start to the last end."""
        first, last = span(self.events)
        return last - first

    @property
    def bubble(self) -> float:
        """Idle time over ideal time; (pp - 1) / num_micro_batches for GPipe and 1F1B."""
        return bubble(self.events).ratio

    @property
    def bubble_rate(self) -> float:
        """Idle time over all time."""
        return bubble(self.events).rate


def simulate(program: Program, durations: Times) -> Simulation:
    """Simulate all ranks, one list each, to the end.

    Raises:
        InternalError: Some ranks are deadlocked; one fault for each.
    """
    ranks = [_Rank(index=i, schedule=list_) for i, list_ in enumerate(program.lists)]
    arrivals: dict[Message, float] = {}
    # Run each rank until it blocks; a send makes its receiver runnable again.
    runnable = deque(ranks)
    while runnable:
        for receiver in _run(runnable.popleft(), program.placement, arrivals, durations):
            runnable.append(ranks[receiver])
    raise_faults(InternalError, [_stuck(rank) for rank in ranks if not rank.is_finished])
    return Simulation(events=tuple(tuple(rank.events) for rank in ranks))


@dataclass(kw_only=True, slots=True)
class _Rank:
    index: int
    schedule: Schedule
    events: list[Event] = field(default_factory=list)
    now: float = 0.0

    @property
    def is_finished(self) -> bool:
        return len(self.events) == len(self.schedule)

    @property
    def next(self) -> Instruction:
        return self.schedule[len(self.events)]

    def carry_out(self, end: float) -> None:
        """Record that the next instruction ends at ``end``."""
        todo = self.next
        self.events.append(Event(todo.op.value, todo.micro_batch, todo.chunk, self.now, end))
        self.now = end


def _run(
    rank: _Rank, placement: Placement, arrivals: dict[Message, float], durations: Times
) -> set[int]:
    """Run until the end or a receive without its send; return the ranks that were sent messages."""
    receivers = set()
    while not rank.is_finished:
        todo = rank.next
        # compute: occupy the rank
        if todo.op in COMPUTE:
            rank.carry_out(rank.now + durations.of_task(rank.index, todo))
            continue
        message = placement.message(rank.index, todo)
        is_own = message is not None and message.sender.rank == message.receiver.rank
        handling = 0.0 if is_own else durations.handling
        # receive: wait for the arrival, or stop until the sender has sent
        if todo.op in RECEIVE:
            if message not in arrivals:
                break
            rank.carry_out(max(rank.now, arrivals.pop(message)) + handling)
            continue
        # send: never waits; the message arrives later
        rank.carry_out(rank.now + handling)
        if message is not None and todo.op in SEND:
            arrivals[message] = rank.now + (0.0 if is_own else durations.transfer)
            if not is_own:
                receivers.add(message.receiver.rank)
    return receivers


def _stuck(rank: _Rank) -> Fault:
    return Fault(
        fact=f"rank {rank.index} waits for ever at instruction {len(rank.events)} of "
        f"{len(rank.schedule)}, {rank.next}",
        rule="the rank that should send it never gets there",
        remedy="correct the schedule that made these lists",
    )
