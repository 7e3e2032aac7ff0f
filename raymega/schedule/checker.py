"""Proves that the lists of all ranks make one training step or one evaluation.

It knows no particular schedule, only what every pipeline must do: each micro-batch passes forward
and backward once through every stage, messages between two ranks are received in the order in which
they were sent, and no rank deadlocks. Deadlocks are found by `raymega.schedule.simulate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from raymega.errors import Fault, InternalError, raise_faults
from raymega.schedule.instructions import (
    COMPUTE,
    FREES_ACTIVATIONS,
    SEND,
    TAKES_GRADIENT,
    Instruction,
    Op,
    Schedule,
)
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.stage_placement import Message, Placement, Program

REMEDY = "correct the schedule that made these lists"
WHOLE, PARTS = frozenset({Op.BACKWARD}), frozenset({Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
BACKWARDS = TAKES_GRADIENT | FREES_ACTIVATIONS | {Op.RECV_BACKWARD, Op.SEND_BACKWARD}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Memory needs of a program that passed the check.

    Attributes:
        peak_activations: Largest number of activations that each rank holds at once. One activation
            is that of one micro-batch on one chunk, held from its forward to the last part of its
            backward. 0 when there is no backward.
    """

    peak_activations: tuple[int, ...]


def check(
    program: Program, *, num_micro_batches: int, is_forward_only: bool = False
) -> CheckResult:
    """Check the instruction lists of all ranks, one list per rank.

    Raises:
        InternalError: With one fault for each mistake in a single list; when there is none, for
            each mismatch between ranks; when there is none, for each rank that deadlocks.
    """
    # Each rank's list alone.
    faults: list[Fault] = []
    for rank in range(program.placement.pp):
        faults += _life_faults(program, rank, num_micro_batches, is_forward_only=is_forward_only)
    raise_faults(InternalError, faults)
    # Message order between ranks, then deadlocks: the simulation raises when a rank is stuck.
    raise_faults(InternalError, _order_faults(program))
    simulate(program, Durations())
    return CheckResult(peak_activations=tuple(map(_peak_activations, program.lists)))


def _lives(placement: Placement, stage: int, *, is_forward_only: bool) -> Iterator[tuple[Op, ...]]:
    """Yield the legal op sequences of a micro-batch on ``stage``: backward split, then whole."""
    # The first and the last stage have no neighbour on one side.
    absent: set[Op] = set()
    if stage == 0:
        absent |= {Op.RECV_FORWARD, Op.SEND_BACKWARD}
    if stage == placement.num_stages - 1:
        absent |= {Op.SEND_FORWARD, Op.RECV_BACKWARD}
    if is_forward_only:
        yield tuple(op for op in Op if op not in absent | BACKWARDS)
        return
    for other in (PARTS, WHOLE):
        yield tuple(op for op in Op if op not in absent | other)


def _life_faults(
    program: Program, rank: int, num_micro_batches: int, *, is_forward_only: bool
) -> Iterator[Fault]:
    """Return a fault for each micro-batch that is missing, unexpected or has wrong ops."""
    placement = program.placement
    # Ops of each micro-batch on each chunk, in the list's order.
    found: defaultdict[tuple[int, int], list[Op]] = defaultdict(list)
    for instruction in program.lists[rank]:
        found[instruction.micro_batch, instruction.chunk].append(instruction.op)
    chunks = range(placement.chunks)
    wanted = {(i, chunk) for i in range(num_micro_batches) for chunk in chunks}
    # Unexpected micro-batches are compared too: their only legal sequence is the empty one.
    for micro_batch, chunk in sorted(wanted | found.keys()):
        lives: list[tuple[Op, ...]] = [()]
        if (micro_batch, chunk) in wanted:
            stage = placement.stage(rank, chunk)
            lives = list(_lives(placement, stage, is_forward_only=is_forward_only))
        life = tuple(found.get((micro_batch, chunk), ()))
        if life not in lives:
            yield _life_fault(rank, micro_batch, chunk, life, lives)


def _life_fault(
    rank: int, micro_batch: int, chunk: int, life: tuple[Op, ...], lives: list[tuple[Op, ...]]
) -> Fault:
    return Fault(
        fact=f"rank {rank}, micro-batch {micro_batch}, chunk {chunk}: "
        f"{', '.join(life) or 'nothing'}",
        rule=f"it must undergo, in this order: {' or '.join(map(', '.join, lives)) or 'nothing'}",
        remedy=REMEDY,
    )


def _order_faults(program: Program) -> list[Fault]:
    """Return a fault for each pair of ranks whose send order differs from the receive order.

    NCCL matches messages by order, not by tag.
    """
    sent, received = _messages(program, is_sending=True), _messages(program, is_sending=False)
    return [
        Fault(
            fact=f"rank {a} sends to rank {b} {_names(sent[a, b])}, which are received as "
            f"{_names(received[a, b])}",
            rule="messages must be received in the order in which they are sent",
            remedy=REMEDY,
        )
        for a, b in sorted(sent.keys() | received.keys())
        if sent[a, b] != received[a, b]
    ]


def _messages(program: Program, *, is_sending: bool) -> defaultdict[tuple[int, int], list[Message]]:
    """Return the sent or the received messages in list order, by sending and receiving rank."""
    found: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, schedule in enumerate(program.lists):
        for instruction in schedule:
            if instruction.op in COMPUTE or (instruction.op in SEND) != is_sending:
                continue
            message = program.placement.message(rank, instruction)
            if message is not None:
                found[message.sender.rank, message.receiver.rank].append(message)
    return found


def _names(messages: list[Message]) -> list[str]:
    return [
        str(Instruction(op=m.op, micro_batch=m.micro_batch, chunk=m.receiver.chunk))
        for m in messages
    ]


def _peak_activations(schedule: Schedule) -> int:
    if all(instruction.op not in FREES_ACTIVATIONS for instruction in schedule):
        return 0
    change = {Op.FORWARD: 1} | dict.fromkeys(FREES_ACTIVATIONS, -1)
    return max(accumulate(change.get(instruction.op, 0) for instruction in schedule))
