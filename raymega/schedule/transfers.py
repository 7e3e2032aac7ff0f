"""Puts sends and receives into lists of work, for any schedule and any placement of stages.

A result is sent right after it is made. A message is taken right before it is needed; messages that
the same sender sent earlier are taken before it, though needed later. So between two ranks messages
are taken in the order in which they are sent, which NCCL needs, and nobody waits for one longer:
what was sent earlier is there earlier.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from raymega.schedule.instructions import TAKES_GRADIENT, Instruction, Op, Schedule
from raymega.schedule.placement import Message, Placement, Program

Channel = tuple[int, int]
"""Sending and receiving rank; equal where a rank hands a message to its own next chunk."""


def make_program(work: Sequence[Schedule], placement: Placement) -> Program:
    """The whole program of lists of work by rank."""
    under_way: defaultdict[Channel, deque[Message]] = defaultdict(deque)
    for rank, schedule in enumerate(work):
        for send in filter(None, (_send_after(task) for task in schedule)):
            message = placement.message(rank, send)
            if message is not None:
                under_way[_channel(message)].append(message)
    lists = []
    for rank, schedule in enumerate(work):
        lists.append(tuple(_with_transfers(rank, schedule, placement, under_way)))
    return Program(placement=placement, lists=tuple(lists))


def _with_transfers(
    rank: int,
    schedule: Schedule,
    placement: Placement,
    under_way: defaultdict[Channel, deque[Message]],
) -> Iterator[Instruction]:
    taken: set[Message] = set()
    for task in schedule:
        receive, send = _receive_before(task), _send_after(task)
        wanted = placement.message(rank, receive) if receive else None
        if wanted is not None:
            queue = under_way[_channel(wanted)]
            while wanted not in taken and queue:
                message = queue.popleft()
                taken.add(message)
                yield Instruction(
                    op=message.op, micro_batch=message.micro_batch, chunk=message.receiver.chunk
                )
        yield task
        if send is not None and placement.message(rank, send) is not None:
            yield send


def _receive_before(task: Instruction) -> Instruction | None:
    if task.op == Op.FORWARD:
        return _like(task, Op.RECV_FORWARD)
    return _like(task, Op.RECV_BACKWARD) if task.op in TAKES_GRADIENT else None


def _send_after(task: Instruction) -> Instruction | None:
    if task.op == Op.FORWARD:
        return _like(task, Op.SEND_FORWARD)
    return _like(task, Op.SEND_BACKWARD) if task.op in TAKES_GRADIENT else None


def _like(task: Instruction, op: Op) -> Instruction:
    return Instruction(op=op, micro_batch=task.micro_batch, chunk=task.chunk)


def _channel(message: Message) -> Channel:
    return message.sender.rank, message.receiver.rank
