"""A recorded step of all ranks: its messages, one clock for all, what its schedule alone would cost.

Ranks start their clocks when they leave a barrier, one a little later than the other. What must have
come before what on two ranks says by how much at least; that is taken off here. It records nothing.
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
    """A message as it was sent and received; the ranks are global."""

    message: Message
    sender: int
    sent: Event
    receiver: int
    received: Event


class _Before(NamedTuple):
    """``earlier`` on one rank's clock came before ``later`` on another's."""

    here: int
    earlier: float
    there: int
    later: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What every rank did in one step.

    Attributes:
        rows: Events by global rank, in seconds since the rank's own start.
        pipelines: Global ranks of each pipeline, by place in it.
        replicas: Global ranks of each data-parallel group; they reduce and gather together.
        placement: Which rank of a pipeline holds which stage.
    """

    rows: Mapping[int, Row]
    pipelines: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[int, ...], ...] = ()
    placement: Placement

    def transfers(self) -> Iterator[Transfer]:
        """Every message between two ranks of which both ends were recorded."""
        for ranks in self.pipelines:
            sent: dict[Message, tuple[int, Event]] = {}
            for place, rank in enumerate(ranks):
                for event, message in self._messages(place, rank, SEND):
                    sent[message] = rank, event
            for place, rank in enumerate(ranks):
                for event, message in self._messages(place, rank, RECEIVE):
                    if message in sent and message.sender.rank != message.receiver.rank:
                        yield Transfer(message, *sent[message], rank, event)

    def aligned(self) -> Recording:
        """The same on one clock: no message arrives before it is sent, no sum is there before the
        last rank has given its part.

        Ranks whose clocks allow that are left as they are; others are put later by as little as it
        takes.
        """
        shifts = dict.fromkeys(self.rows, 0.0)
        bounds: defaultdict[tuple[int, int], float] = defaultdict(lambda: float("-inf"))
        for here, earlier, there, later in self._order():
            bounds[here, there] = max(bounds[here, there], earlier - later)
        for _ in shifts:  # the longest way leads through every rank once
            before = dict(shifts)
            for (here, there), bound in bounds.items():
                shifts[there] = max(shifts[there], shifts[here] + bound)
            if shifts == before:
                break
        return replace(
            self, rows={rank: _shifted(row, shifts[rank]) for rank, row in self.rows.items()}
        )

    def simulated(self) -> Simulation:
        """The step again, with the durations that its work had and messages that take no time.

        What the recorded step idled beyond this, its transfers and its machine made it wait.
        """
        events: list[tuple[Event, ...]] = []
        for ranks in self.pipelines:
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
        for ranks in self.replicas:
            launches = [_collectives(self.rows[rank]) for rank in ranks]
            for here, (a, others) in enumerate(zip(ranks, launches, strict=True)):
                there = (here + 1) % len(ranks)
                for key in others.keys() & launches[there].keys():
                    yield _Before(a, others[key][0], ranks[there], launches[there][key][1])
                    yield _Before(ranks[there], launches[there][key][0], a, others[key][1])


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Durations of a recorded step, by place and task; its messages take no time."""

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
    """Launch and completion of each sum of gradients.

    Weights are gathered from before the step began, so of those only the completion is on record.
    """
    return {event[:3]: event[3:] for event in row if event[0] == "reduce"}


def _shifted(row: Row, shift_s: float) -> Row:
    if shift_s == 0:
        return row
    return tuple(Event(*event[:3], event[3] + shift_s, event[4] + shift_s) for event in row)
