"""The vocabulary of schedules: eight operations, and the instruction that applies one.

It owns the vocabulary; the orders are in `raymega.schedule.schedules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """Operations of a rank on a micro-batch, in the order in which one micro-batch undergoes them.

    A backward is either whole, ``BACKWARD``, or split: ``BACKWARD_INPUT`` computes the gradient of
    the stage's input, which the previous stage waits for. ``BACKWARD_WEIGHT`` computes the
    gradients of the weights at any later time.
    """

    RECV_FORWARD = "recv_forward"
    FORWARD = "forward"
    SEND_FORWARD = "send_forward"
    RECV_BACKWARD = "recv_backward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    SEND_BACKWARD = "send_backward"
    BACKWARD_WEIGHT = "backward_weight"

    # Enum's own hash is Python code, and every step looks up hundreds of instructions.
    __hash__ = str.__hash__


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
RECEIVE = frozenset({Op.RECV_FORWARD, Op.RECV_BACKWARD})
SEND = frozenset({Op.SEND_FORWARD, Op.SEND_BACKWARD})
TAKES_GRADIENT = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})
FREES_ACTIVATIONS = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """Application of ``op`` to one micro-batch on one of the rank's model chunks."""

    op: Op
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f" chunk {self.chunk}" if self.chunk else ""
        return f"{self.op} {self.micro_batch}{chunk}"


Schedule = tuple[Instruction, ...]
