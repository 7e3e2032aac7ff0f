"""Inserts sends and receives into lists of work, for any schedule and any placement of stages.

A result is sent right after it is computed. A message is received right before it is needed;
messages that the same sender sent earlier are received before it, even if needed later. So messages
between two ranks are received in the order in which they are sent, which NCCL needs. No rank waits
longer for that: an earlier message arrives earlier.

A rank may run a forward together with the whole backward that follows it, of another micro-batch,
as DualPipe does. Then the messages that either needs are received before both, and both results are
sent after both.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from raymega.schedule.instructions import TAKES_GRADIENT, Instruction, Op, Schedule
from raymega.schedule.stage_placement import Message, Placement, Program

Channel = tuple[int, int]
"""Sending and receiving rank; equal where a rank passes a message to another chunk of its own."""


def make_program(
    work: Sequence[Schedule], placement: Placement, *, is_paired: bool = False
) -> Program:
    """Make the program from lists of work by rank; :func:`rounds` explains ``is_paired``."""
    # First all messages in the order in which their senders send them.
    under_way: defaultdict[Channel, deque[Message]] = defaultdict(deque)
    for rank, schedule in enumerate(work):
        for send in filter(None, (_send_after(task) for task in schedule)):
            message = placement.message(rank, send)
            if message is not None:
                under_way[_channel(message)].append(message)
    # Then each rank's list, which receives them in that order.
    lists = []
    for rank, schedule in enumerate(work):
        parts = rounds(schedule, is_paired=is_paired)
        lists.append(tuple(_with_transfers(rank, parts, placement, under_way)))
    return Program(placement=placement, lists=tuple(lists))


def rounds(schedule: Schedule, *, is_paired: bool = True) -> list[tuple[Instruction, ...]]:
    """Group a list into rounds: one instruction, or with ``is_paired`` two passes run together."""
    found: list[tuple[Instruction, ...]] = []
    for task in schedule:
        if is_paired and found and len(found[-1]) == 1 and _are_together(found[-1][0], task):
            found[-1] = (*found[-1], task)
        else:
            found.append((task,))
    return found


def _are_together(task: Instruction, following: Instruction) -> bool:
    are_passes = task.op is Op.FORWARD and following.op is Op.BACKWARD
    return are_passes and task.micro_batch != following.micro_batch


def _with_transfers(
    rank: int,
    parts: Sequence[tuple[Instruction, ...]],
    placement: Placement,
    under_way: defaultdict[Channel, deque[Message]],
) -> Iterator[Instruction]:
    taken: set[Message] = set()
    for tasks in parts:
        # Receives before all tasks of the round, sends after all of them.
        for task in tasks:
            receive = _receive_before(task)
            wanted = placement.message(rank, receive) if receive else None
            if wanted is not None:
                yield from _receives(wanted, under_way[_channel(wanted)], taken)
        yield from tasks
        for task in tasks:
            send = _send_after(task)
            if send is not None and placement.message(rank, send) is not None:
                yield send


def _receives(wanted: Message, queue: deque[Message], taken: set[Message]) -> Iterator[Instruction]:
    """Yield receives of the sender's messages up to ``wanted`` that were not yet received."""
    while wanted not in taken and queue:
        message = queue.popleft()
        taken.add(message)
        yield Instruction(
            op=message.op, micro_batch=message.micro_batch, chunk=message.receiver.chunk
        )


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
