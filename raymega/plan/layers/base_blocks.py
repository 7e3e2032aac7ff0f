"""Define a frozen base in blocks (QLoRA): which weights are held as codes, the formats, and their bytes.

Dettmers et al., QLoRA: efficient finetuning of quantized LLMs, 2023. A block is BLOCK neighbours of a row of the whole
tensor; the last one of a row may be shorter. So blocks do not depend on how the tensor is cut, and a rank may hold a part
of one. `parallel/core/block_codes.py` computes codes and scales.
"""

from __future__ import annotations

from itertools import pairwise
from struct import pack, unpack
from typing import Protocol

from raymega.box import Box

BLOCK = 64
"""Weights that share a scale (QLoRA, section 3)."""
SCALE_BLOCK = 256
"""Scales of a matrix, in the order of its elements, that share a scale of their own: double quantisation."""
CODE_BITS = {"nf4": 4, "fp8": 8}
"""Bits of a weight's code by ``model.lora.base_dtype``."""
COMPUTE = "compute"
"""Value of ``base_dtype`` that keeps all weights in the compute dtype."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of NF4 (QLoRA, appendix E): quantiles of a normal distribution, with an exact zero."""
DYNAMIC_DIGITS = 7
"""Powers of ten of the 8-bit dynamic map, from 1e-6 to 1."""
MEAN_BITS = 36
"""Bits to which each scale is rounded for their mean, so that the sum is the same in any order."""
AT_ONCE = {"cpu": 2**18, "cuda": 2**22}
"""Weights that are encoded or decoded at a time, by device: few for a CPU's cache, many for a GPU's launches."""
TEMPORARY_BYTES = 16
"""Bytes of one of them meanwhile: code, value, scale and product."""
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


def format_values(base_dtype: str) -> tuple[float, ...]:
    """Return the values of a format between -1 and 1, ascending and in float32: 16 of nf4, 253 of fp8."""
    if base_dtype == "nf4":
        return NF4
    # float8 e4m3: eight steps between two powers of two, below 2^-6 as above; 448 is the largest
    steps = [m * 2.0**-9 for m in range(8)]
    steps += [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
    shares = [_single(step / 448) for step in steps if step <= 448]
    return (*(-share for share in reversed(shares[1:])), *shares)


def dynamic_values() -> tuple[float, ...]:
    """Return the 256 values of the signed 8-bit dynamic map between -1 and 1, ascending (Dettmers 2015).

    Each power of ten has twice as many values as the one below it: the middles of even parts, in float32.
    """
    found = [0.0, 1.0]
    for digit in range(DYNAMIC_DIGITS):
        parts, first = 2**digit, _single(0.1)
        step = _single(_single(1 - first) / parts)
        # from both ends to the middle, as torch.linspace
        edges = [
            _single(first + step * n if n < (parts + 1) // 2 else 1 - step * (parts - n))
            for n in range(parts + 1)
        ]
        power = _single(10.0 ** (digit + 1 - DYNAMIC_DIGITS))
        for low, high in pairwise(edges):
            middle = _single(_single(_single(low + high) / 2) * power)
            found += [middle, -middle]
    return tuple(sorted(found))


def _single(value: float) -> float:
    """Return the float32 nearest to ``value``."""
    number: float = unpack("f", pack("f", value))[0]
    return number


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
