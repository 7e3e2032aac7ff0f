"""Number formats of weight files as numpy arrays, and how one becomes another.

numpy has no bfloat16, so an array of it holds the bits as uint16; every format travels with its
name. No tensor library is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymega.checkpoint.format.dtypes import from_bfloat16, storage_type

Array = NDArray[Any]

SAFETENSORS_CODES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
STRIDE = 2**16
CODE_OF = {dtype: code for code, dtype in SAFETENSORS_CODES.items()}


def recast(values: Array, source: str, target: str) -> Array:
    """``values`` of format ``source`` in format ``target``, rounded to nearest, ties to even."""
    if source == target:
        return values
    wide = from_bfloat16(values) if source == "bfloat16" else values
    return _to_bfloat16(wide) if target == "bfloat16" else wide.astype(storage_type(target))


def _to_bfloat16(values: Array) -> Array:
    flat = values.reshape(-1)
    target = np.empty(flat.shape, "<u2")
    for start in range(0, len(flat), STRIDE):  # the steps between need three times the memory
        target[start : start + STRIDE] = _rounded_bits(flat[start : start + STRIDE])
    return target.reshape(values.shape)


def _rounded_bits(values: Array) -> Array:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # Rounding the mantissa of a NaN could carry into an infinity, so a NaN keeps a bit set.
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
