"""Define a frozen base in blocks (QLoRA): which weights are held as codes, the formats, and their bytes.

Dettmers et al., QLoRA: efficient finetuning of quantized LLMs, 2023. A block is BLOCK neighbours of a row of the whole
tensor; the last one of a row may be shorter. So blocks do not depend on how the tensor is cut, and a rank may hold a part
of one. `parallel/core/block_codes.py` computes codes and scales.
"""

from __future__ import annotations

from typing import Protocol

from raymega.messages import Box

BLOCK = 64
"""Weights that share a scale (QLoRA, section 3)."""
SCALE_BLOCK = 256
"""Scales of a matrix, in the order of its elements, that share a scale of their own: double quantisation."""
CODE_BITS = {"nf4": 4, "fp8": 8}
"""Bits of a weight's code by ``model.lora.base_dtype``."""
COMPUTE = "compute"
"""Value of ``base_dtype`` that keeps all weights in the compute dtype."""
NUMBER_BYTES = 4
"""Bytes of a scale of scales, and of a matrix's mean scale."""


class BlockTensor(Protocol):
    """The interface of a tensor of `layers/global_tensor.py`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""

    @property
    def role(self) -> str:
        """Role for the optimizer."""

    @property
    def is_wide(self) -> bool:
        """True where it is kept in float32 or better."""

    @property
    def is_carried(self) -> bool:
        """True where no layer reads it."""

    @property
    def name(self) -> str:
        """Name of the tensor."""


def is_in_blocks(tensor: BlockTensor, base_dtype: str) -> bool:
    """Return whether a frozen tensor is held as codes: a matrix of a block of the language model."""
    is_matrix = tensor.role == "matrix" and not (tensor.is_wide or tensor.is_carried)
    # a vision tower stays in the compute dtype, as do embedding and head
    return base_dtype != COMPUTE and is_matrix and not tensor.name.startswith("vision.")


def row_blocks(columns: int) -> int:
    """Return the number of blocks in a row of ``columns`` elements."""
    return -(-columns // BLOCK)


def box_blocks(box: Box) -> tuple[int, int]:
    """Return the first block of a row with an element in ``box``, and the number of such blocks."""
    first, size = box.offset[-1], box.shape[-1]
    return first // BLOCK, row_blocks(first + size) - first // BLOCK


def code_bytes(count: int, base_dtype: str) -> int:
    """Return the bytes of the codes of ``count`` weights."""
    return -(-count * CODE_BITS[base_dtype] // 8)


def scale_bytes(shape: tuple[int, ...], box: Box) -> int:
    """Return the bytes of the scales of a rank's ``box`` of a tensor: its blocks' codes, and whole second-level scales."""
    *experts, rows, _ = box.shape
    matrices = experts[0] if experts else 1
    second = -(-shape[-2] * row_blocks(shape[-1]) // SCALE_BLOCK)
    return matrices * (rows * box_blocks(box)[1] + (second + 1) * NUMBER_BYTES)
