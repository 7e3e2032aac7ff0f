"""The words a schedule is written in: six operations, and the instruction that applies one.

It owns the vocabulary and the two phrases that every schedule repeats, not their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from raymega.errors import Fault, PlanError


class Op(StrEnum):
    """What a stage can do to a micro-batch, in the order in which a micro-batch undergoes it."""

    RECV_FORWARD = "recv_forward"
    FORWARD = "forward"
    SEND_FORWARD = "send_forward"
    RECV_BACKWARD = "recv_backward"
    BACKWARD = "backward"
    SEND_BACKWARD = "send_backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """Apply ``op`` to one micro-batch on one of the rank's model chunks."""

    op: Op
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f" chunk {self.chunk}" if self.chunk else ""
        return f"{self.op} {self.micro_batch}{chunk}"


Schedule = tuple[Instruction, ...]


def forward_pass(*, pp: int, stage: int, micro_batch: int) -> Schedule:
    """Take the activation from the stage before, compute, hand the result to the stage after."""
    ops = [Op.FORWARD]
    if stage > 0:
        ops.insert(0, Op.RECV_FORWARD)
    if stage < pp - 1:
        ops.append(Op.SEND_FORWARD)
    return tuple(Instruction(op=op, micro_batch=micro_batch) for op in ops)


def backward_pass(*, pp: int, stage: int, micro_batch: int) -> Schedule:
    """Take the gradient from the stage after, compute, hand the result to the stage before."""
    ops = [Op.BACKWARD]
    if stage < pp - 1:
        ops.insert(0, Op.RECV_BACKWARD)
    if stage > 0:
        ops.append(Op.SEND_BACKWARD)
    return tuple(Instruction(op=op, micro_batch=micro_batch) for op in ops)


def refuse_chunks(name: str, chunks: int) -> None:
    """Raise PlanError for a schedule that knows one model chunk a rank when asked for several."""
    if chunks != 1:
        raise PlanError(
            Fault(
                fact=f"schedule.chunks={chunks}",
                rule=f"the schedule {name} works on 1 model chunk a rank, and interleaving is not "
                "built yet",
                remedy="set schedule.chunks=1",
            )
        )
