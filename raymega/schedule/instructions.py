"""The words a schedule is written in: eight operations, and the instruction that applies one.

It owns the vocabulary, not any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """What a rank can do to a micro-batch, in the order in which a micro-batch undergoes it.

    A backward is either whole, ``BACKWARD``, or in two parts: ``BACKWARD_INPUT`` makes the gradient
    that the stage before waits for, ``BACKWARD_WEIGHT`` those of the weights, at any later time.
    """

    RECV_FORWARD = "recv_forward"
    FORWARD = "forward"
    SEND_FORWARD = "send_forward"
    RECV_BACKWARD = "recv_backward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    SEND_BACKWARD = "send_backward"
    BACKWARD_WEIGHT = "backward_weight"

    # Enum's own is Python, and every step looks up instructions by the hundred.
    __hash__ = str.__hash__


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
RECEIVE = frozenset({Op.RECV_FORWARD, Op.RECV_BACKWARD})
SEND = frozenset({Op.SEND_FORWARD, Op.SEND_BACKWARD})
TAKES_GRADIENT = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})
FREES_ACTIVATIONS = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})


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
