"""Analyses a recorded step of all ranks: its messages, a common clock, its schedule's own cost.

Each rank starts its clock when it leaves a barrier, some a little later than others. Pairs of
events on two ranks whose order is known give a lower bound of that offset, which is removed here.
Events are recorded by `raymega.pipeline.executor`, not here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from raymega.schedule.instructions import RECEIVE, SEND, Instruction, Op
from raymega.schedule.simulate import Simulation, simulate
from raymega.schedule.stage_placement import Message, Placement, Program
from raymega.schedule.timeline import Event, EventTuple

Row = Sequence[EventTuple]
OPS = frozenset(op.value for op in Op)


class Transfer(NamedTuple):
    """A message with its send and receive events; ``sender`` and ``receiver`` are global ranks."""

    message: Message
    sender: int
    sent: Event
    receiver: int
    received: Event


class _Before(NamedTuple):
    """Known order: time ``earlier`` on rank ``here``'s clock is before ``later`` on ``there``'s."""

    here: int
    earlier: float
    there: int
    later: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Recorded events of all ranks in one step.

    Attributes:
        rows: Events by global rank, in seconds since the rank's own start.
        pipelines: Global ranks of each pipeline, in order of their pipeline rank.
        replicas: Global ranks of each data-parallel group; they reduce and gather together.
        placement: Assignment of stages to the ranks of a pipeline.
    """

    rows: Mapping[int, Row]
    pipelines: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[int, ...], ...] = ()
    placement: Placement

    def transfers(self) -> Iterator[Transfer]:
        """Yield every message between two ranks whose send and receive were both recorded."""
        for ranks in self.pipelines:
            # Collect all sends first, then match receives with them.
            sent: dict[Message, tuple[int, Event]] = {}
            for place, rank in enumerate(ranks):
                for event, message in self._messages(place, rank, SEND):
                    sent[message] = rank, event
            for place, rank in enumerate(ranks):
                for event, message in self._messages(place, rank, RECEIVE):
                    if message in sent and message.sender.rank != message.receiver.rank:
                        yield Transfer(message, *sent[message], rank, event)

    def aligned(self) -> Recording:
        """Return the recording with all ranks on one clock.

        No message then arrives before it is sent, and no gradient reduction completes before the
        last rank has launched it. Ranks whose clocks already satisfy that keep their times;
        the others are moved later by the least shift that does.
        """
        # Lower bound of the shift between each pair of ranks.
        shifts = dict.fromkeys(self.rows, 0.0)
        bounds: defaultdict[tuple[int, int], float] = defaultdict(lambda: float("-inf"))
        for here, earlier, there, later in self._order():
            bounds[here, there] = max(bounds[here, there], earlier - later)
        # Longest paths by relaxation, as Bellman-Ford: each visits every rank at most once.
        for _ in shifts:
            before = dict(shifts)
            for (here, there), bound in bounds.items():
                shifts[there] = max(shifts[there], shifts[here] + bound)
            if shifts == before:
                break
        return replace(
            self, rows={rank: _shifted(row, shifts[rank]) for rank, row in self.rows.items()}
        )

    def simulated(self) -> Simulation:
        """Simulate the step with the recorded durations of its work and messages that take no time.

        Idle time of the recorded step beyond this was caused by its transfers and its machine.
        """
        events: list[tuple[Event, ...]] = []
        for ranks in self.pipelines:
            # the recorded order and durations of each rank, without its idle times
            lists = [_tasks(self.rows[rank]) for rank in ranks]
            times = _Recorded(
                {
                    (place, task): end_s - start_s
                    for place, tasks in enumerate(lists)
                    for task, start_s, end_s in tasks
                }
            )
            program = Program(
                placement=self.placement,
                lists=tuple(tuple(task for task, _, _ in tasks) for tasks in lists),
            )
            events += simulate(program, times).events
        return Simulation(events=tuple(events))

    def _messages(
        self, place: int, rank: int, ops: frozenset[Op]
    ) -> Iterator[tuple[Event, Message]]:
        for event in self.rows[rank]:
            if event[0] in ops:
                message = self.placement.message(place, _task(event))
                if message is not None:
                    yield Event(*event), message

    def _order(self) -> Iterator[_Before]:
        for transfer in self.transfers():
            yield _Before(
                transfer.sender, transfer.sent.start_s, transfer.receiver, transfer.received.end_s
            )
        # A reduction ends only after every rank has launched it; compared between ring neighbours.
        for ranks in self.replicas:
            launches = [_collectives(self.rows[rank]) for rank in ranks]
            for here, (a, others) in enumerate(zip(ranks, launches, strict=True)):
                there = (here + 1) % len(ranks)
                for key in others.keys() & launches[there].keys():
                    yield _Before(a, others[key][0], ranks[there], launches[there][key][1])
                    yield _Before(ranks[there], launches[there][key][0], a, others[key][1])


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Durations of a recorded step, by pipeline rank and task; its messages take no time."""

    seconds: Mapping[tuple[int, Instruction], float]
    transfer: float = 0.0
    handling: float = 0.0

    def of_task(self, rank: int, task: Instruction) -> float:
        return self.seconds[rank, task]


def _task(event: EventTuple) -> Instruction:
    return Instruction(op=Op(event[0]), micro_batch=event[1], chunk=event[2])


def _tasks(row: Row) -> list[tuple[Instruction, float, float]]:
    return [(_task(event), event[3], event[4]) for event in row if event[0] in OPS]


def _collectives(row: Row) -> dict[tuple[str, int, int], tuple[float, float]]:
    """Return launch and completion times of each gradient reduction.

    The gather of weights is launched before the step begins, so only its completion is recorded.
    """
    return {event[:3]: event[3:] for event in row if event[0] == "reduce"}


def _shifted(row: Row, shift_s: float) -> Row:
    if shift_s == 0:
        return row
    return tuple(Event(*event[:3], event[3] + shift_s, event[4] + shift_s) for event in row)
