"""Number formats of weight files as numpy arrays, and conversions between them.

numpy has no bfloat16, so a bfloat16 array holds the bits as uint16, and every array is passed together
with the name of its format. No tensor library is needed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymega.checkpoint.format.dtypes import from_bfloat16, storage_type

Array = NDArray[Any]

SAFETENSORS_CODES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
STRIDE = 2**16
"""Number of elements that are rounded at once."""
CODE_OF = {dtype: code for code, dtype in SAFETENSORS_CODES.items()}


def common_format(formats: Collection[str]) -> str:
    """Return the checkpoint format that holds values of all ``formats`` without rounding."""
    # Checkpoints have no float16; float32 holds its values.
    if "float64" in formats:
        return "float64"
    return "bfloat16" if {*formats} == {"bfloat16"} else "float32"


def recast(values: Array, source: str, target: str) -> Array:
    """Convert ``values`` from format ``source`` to ``target``, rounding to nearest, ties to even."""
    if source == target:
        return values
    # Every conversion goes through a format that numpy knows.
    wide = from_bfloat16(values) if source == "bfloat16" else values
    return _to_bfloat16(wide) if target == "bfloat16" else wide.astype(storage_type(target))


def _to_bfloat16(values: Array) -> Array:
    flat = values.reshape(-1)
    target = np.empty(flat.shape, "<u2")
    for start in range(0, len(flat), STRIDE):  # bounds the temporaries: three times their input
        target[start : start + STRIDE] = _rounded_bits(flat[start : start + STRIDE])
    return target.reshape(values.shape)


def _rounded_bits(values: Array) -> Array:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Round to nearest, ties to even: add half a unit of the upper 16 bits, less one if they are even.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # Rounding could carry the mantissa of a NaN over into Inf, so a NaN is cut and made quiet.
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
