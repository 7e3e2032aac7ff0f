"""Element types that a checkpoint can hold, by numpy's names, and what safetensors calls them.

numpy has no bfloat16, so an array of it holds the bits as uint16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymega.errors import CheckpointError, Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementType:
    """A number format; ``digits`` are the bits of its significand, by which formats widen."""

    num_bytes: int
    digits: int
    safetensors_code: str


ELEMENT_TYPES = {
    "float64": ElementType(num_bytes=8, digits=53, safetensors_code="F64"),
    "float32": ElementType(num_bytes=4, digits=24, safetensors_code="F32"),
    "bfloat16": ElementType(num_bytes=2, digits=8, safetensors_code="BF16"),
    "uint8": ElementType(num_bytes=1, digits=8, safetensors_code="U8"),
}


def element_type(name: str) -> ElementType:
    """The entry of ``name``.

    Raises:
        CheckpointError: Tensors of that type cannot be saved.
    """
    if name in ELEMENT_TYPES:
        return ELEMENT_TYPES[name]
    raise CheckpointError(
        Fault(
            fact=f"a tensor has dtype {name}",
            rule=f"checkpoints hold {', '.join(ELEMENT_TYPES)}",
            remedy="keep it out of the state, or add the type to checkpoint/format/dtypes.py",
        )
    )


def storage_type(dtype: str) -> np.dtype[Any]:
    """The numpy type that holds ``dtype``, little-endian."""
    return np.dtype("<u2" if dtype == "bfloat16" else dtype).newbyteorder("<")


def from_bfloat16(bits: NDArray[Any]) -> NDArray[Any]:
    """Numbers in float32, whose upper half ``bits`` are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
