"""Proves that the lists of all stages make one training step or one evaluation.

It knows what a pipeline must do and no schedule: each micro-batch goes down once and comes back
once, messages between two stages are taken in the order in which they were sent, and nobody waits
for ever. Time is simulate's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from raymega.errors import Fault, InternalError, raise_faults
from raymega.schedule.instructions import Op, Schedule
from raymega.schedule.simulate import Durations, simulate

REMEDY = "correct the schedule that made these lists"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What lists that passed will need.

    Attributes:
        peak_activations: By stage, the most micro-batches whose activations are held at once;
            0 when there is no backward to hold them for.
    """

    peak_activations: tuple[int, ...]


def check(
    schedules: Sequence[Schedule], *, num_micro_batches: int, is_forward_only: bool = False
) -> CheckResult:
    """Check one list a stage.

    Raises:
        InternalError: With a fault for everything that is wrong with single lists; when those are
            right, with everything wrong between stages; and then with a deadlock.
    """
    faults = []
    for stage, schedule in enumerate(schedules):
        life = _life(stage, len(schedules), is_forward_only=is_forward_only)
        faults += _life_faults(stage, schedule, life, num_micro_batches)
    raise_faults(InternalError, faults)
    raise_faults(InternalError, _order_faults(schedules))
    simulate(schedules, Durations())
    return CheckResult(peak_activations=tuple(map(_peak_activations, schedules)))


def _life(stage: int, pp: int, *, is_forward_only: bool) -> tuple[Op, ...]:
    """What a micro-batch must undergo on ``stage``, in this order."""
    absent: set[Op] = set()
    if stage == 0:
        absent |= {Op.RECV_FORWARD, Op.SEND_BACKWARD}
    if stage == pp - 1:
        absent |= {Op.SEND_FORWARD, Op.RECV_BACKWARD}
    if is_forward_only:
        absent |= {Op.RECV_BACKWARD, Op.BACKWARD, Op.SEND_BACKWARD}
    return tuple(op for op in Op if op not in absent)


def _life_faults(
    stage: int, schedule: Schedule, life: tuple[Op, ...], num_micro_batches: int
) -> list[Fault]:
    """Micro-batches that undergo something else, and those that should not be there."""
    found: defaultdict[tuple[int, int], list[Op]] = defaultdict(list)
    for instruction in schedule:
        found[instruction.micro_batch, instruction.chunk].append(instruction.op)
    wanted = {(micro_batch, 0) for micro_batch in range(num_micro_batches)}
    faults = []
    for key in sorted(wanted | found.keys()):
        expected = life if key in wanted else ()
        if tuple(found.get(key, ())) != expected:
            faults.append(
                Fault(
                    fact=f"stage {stage}, micro-batch {key[0]}, chunk {key[1]}: "
                    f"{', '.join(found.get(key, ())) or 'nothing'}",
                    rule=f"it must undergo, in this order: {', '.join(expected) or 'nothing'}",
                    remedy=REMEDY,
                )
            )
    return faults


def _order_faults(schedules: Sequence[Schedule]) -> list[Fault]:
    """Neighbours that send in one order and receive in another; NCCL matches by order, not tag."""
    faults = []
    for stage, (upper, lower) in enumerate(pairwise(schedules)):
        for sender, send, receiver, receive in (
            (upper, Op.SEND_FORWARD, lower, Op.RECV_FORWARD),
            (lower, Op.SEND_BACKWARD, upper, Op.RECV_BACKWARD),
        ):
            sent, received = _micro_batches(sender, send), _micro_batches(receiver, receive)
            if sent != received:
                faults.append(
                    Fault(
                        fact=f"stages {stage} and {stage + 1}: {send} {sent}, {receive} {received}",
                        rule="messages must be received in the order in which they are sent",
                        remedy=REMEDY,
                    )
                )
    return faults


def _micro_batches(schedule: Schedule, op: Op) -> list[int]:
    return [instruction.micro_batch for instruction in schedule if instruction.op == op]


def _peak_activations(schedule: Schedule) -> int:
    if all(instruction.op != Op.BACKWARD for instruction in schedule):
        return 0
    change = {Op.FORWARD: 1, Op.BACKWARD: -1}
    return max(accumulate(change.get(instruction.op, 0) for instruction in schedule))
