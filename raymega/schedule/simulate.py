"""Plays the lists of all stages on an abstract machine with given durations.

The machine is the executor's contract: a stage works through its list in order, a send costs it
nothing and never waits, a receive waits for the matching send. It measures no real machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from raymega.errors import Fault, InternalError, raise_faults
from raymega.schedule.instructions import Instruction, Op, Schedule
from raymega.schedule.timeline import RECEIVE, Event, bubble, span


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """Time of a stage's forward and backward, and from a send to its arrival; in one unit."""

    forward: float = 1.0
    backward: float = 2.0
    transfer: float = 0.0

    def of(self, op: Op) -> float:
        """How long the stage itself is occupied by ``op``."""
        return {Op.FORWARD: self.forward, Op.BACKWARD: self.backward}.get(op, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What happened: the events of each stage, in the order of its list."""

    events: tuple[tuple[Event, ...], ...]

    @property
    def time(self) -> float:
        """From the first start to the last end."""
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


def simulate(schedules: Sequence[Schedule], durations: Durations) -> Simulation:
    """Play one list a stage to the end.

    Raises:
        InternalError: Some stages wait for ever; one fault for each.
    """
    stages = [_Stage(index=i, schedule=s) for i, s in enumerate(schedules)]
    arrivals: dict[_Message, float] = {}
    runnable = deque(stages)
    while runnable:
        for receiver in _run(runnable.popleft(), arrivals, durations):
            if receiver < len(stages):
                runnable.append(stages[receiver])
    raise_faults(InternalError, [_stuck(stage) for stage in stages if not stage.is_finished])
    return Simulation(events=tuple(tuple(stage.events) for stage in stages))


# The receiving stage and the receive instruction that a message answers.
_Message = tuple[int, Instruction]

_ANSWERS = {
    Op.SEND_FORWARD: (Op.RECV_FORWARD, +1),
    Op.SEND_BACKWARD: (Op.RECV_BACKWARD, -1),
}


@dataclass(kw_only=True, slots=True)
class _Stage:
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
        """The next instruction is done at ``end``."""
        todo = self.next
        self.events.append(Event(todo.op.value, todo.micro_batch, todo.chunk, self.now, end))
        self.now = end


def _run(stage: _Stage, arrivals: dict[_Message, float], durations: Durations) -> list[int]:
    """Work until the end or an unanswered receive; the stages that were sent something."""
    receivers = []
    while not stage.is_finished:
        todo = stage.next
        if todo.op in RECEIVE:
            if (stage.index, todo) not in arrivals:
                break
            stage.carry_out(max(stage.now, arrivals.pop((stage.index, todo))))
            continue
        stage.carry_out(stage.now + durations.of(todo.op))
        if todo.op in _ANSWERS:
            message = _message(stage.index, todo)
            arrivals[message] = stage.now + durations.transfer
            receivers.append(message[0])
    return receivers


def _message(sender: int, send: Instruction) -> _Message:
    op, step = _ANSWERS[send.op]
    return sender + step, Instruction(op=op, micro_batch=send.micro_batch, chunk=send.chunk)


def _stuck(stage: _Stage) -> Fault:
    return Fault(
        fact=f"stage {stage.index} waits for ever at instruction {len(stage.events)} of "
        f"{len(stage.schedule)}, {stage.next}",
        rule="the stage that should send it never gets there",
        remedy="correct the schedule that made these lists",
    )
