"""Element types that a checkpoint can hold, by numpy's names, with their safetensors codes.

numpy has no bfloat16, so a bfloat16 array holds the bits as uint16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymega.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementType:
    """A number format.

    Attributes:
        num_bytes: Size of one element in bytes.
        digits: Bits of the significand; a conversion to fewer of them would lose precision.
        safetensors_code: Name of the type in a safetensors header.
    """

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
    """Return the entry of ELEMENT_TYPES for ``name``.

    Raises:
        CheckpointError: Checkpoints cannot hold tensors of that type.
    """
    if name in ELEMENT_TYPES:
        return ELEMENT_TYPES[name]
    raise CheckpointError(
        fact=f"a tensor has dtype {name}",
        rule=f"checkpoints hold {', '.join(ELEMENT_TYPES)}",
        remedy="keep it out of the state, or add the type to checkpoint/format/dtypes.py",
    )


def storage_type(dtype: str) -> np.dtype[Any]:
    """Return the little-endian numpy type that holds ``dtype``."""
    return np.dtype("<u2" if dtype == "bfloat16" else dtype).newbyteorder("<")


def from_bfloat16(bits: NDArray[Any]) -> NDArray[Any]:
    """Return bfloat16 numbers, given as uint16 ``bits``, as float32 of the same values."""
    # A bfloat16 is the upper half of a float32.
    return (bits.astype(np.uint32) << 16).view(np.float32)
