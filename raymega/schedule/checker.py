"""Proves that the lists of all ranks make one training step or one evaluation.

It knows what a pipeline must do and no schedule: each micro-batch goes down once and comes back
once through every stage, messages between two ranks are taken in the order in which they were sent,
and nobody waits for ever. Time is simulate's.
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
    """What lists that passed will need.

    Attributes:
        peak_activations: By rank, the most activations held at once, each of one micro-batch on one
            chunk, from its forward to the last part of its backward; 0 when there is no backward.
    """

    peak_activations: tuple[int, ...]


def check(
    program: Program, *, num_micro_batches: int, is_forward_only: bool = False
) -> CheckResult:
    """Check one list a rank.

    Raises:
        InternalError: With a fault for everything that is wrong with single lists; when those are
            right, with everything wrong between ranks; and then with a deadlock.
    """
    faults = []
    for rank in range(program.placement.pp):
        faults += _life_faults(program, rank, num_micro_batches, is_forward_only=is_forward_only)
    raise_faults(InternalError, faults)
    raise_faults(InternalError, _order_faults(program))
    simulate(program, Durations())
    return CheckResult(peak_activations=tuple(map(_peak_activations, program.lists)))


def _lives(placement: Placement, stage: int, *, is_forward_only: bool) -> Iterator[tuple[Op, ...]]:
    """What a micro-batch may undergo on ``stage``, in this order: its backward whole or in parts."""
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
) -> list[Fault]:
    """Micro-batches that undergo something else, and those that should not be there."""
    placement = program.placement
    found: defaultdict[tuple[int, int], list[Op]] = defaultdict(list)
    for instruction in program.lists[rank]:
        found[instruction.micro_batch, instruction.chunk].append(instruction.op)
    chunks = range(placement.chunks)
    wanted = {(i, chunk) for i in range(num_micro_batches) for chunk in chunks}
    faults = []
    for micro_batch, chunk in sorted(wanted | found.keys()):
        lives: list[tuple[Op, ...]] = [()]
        if (micro_batch, chunk) in wanted:
            stage = placement.stage(rank, chunk)
            lives = list(_lives(placement, stage, is_forward_only=is_forward_only))
        life = tuple(found.get((micro_batch, chunk), ()))
        if life not in lives:
            faults.append(_life_fault(rank, micro_batch, chunk, life, lives))
    return faults


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
    """Ranks that send in one order and receive in another; NCCL matches by order, not by tag."""
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
    """By sending and receiving rank, what the one sends or the other receives, in its order."""
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
