"""Quantised weight files read as plain tensors: MXFP4 of GPT-OSS, float8 in blocks of DeepSeek-V3.

A weight there is two tensors, codes and scales. It is multiplied out when it is read, one tensor at a
time, in float32; MXFP4's products are exact in bfloat16 too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raymega.convert.number_formats import Array, common_format
from raymega.convert.safetensors_files import PLAIN_FORMATS, WeightEntry
from raymega.errors import ConfigError, Fault, raise_faults

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of MXFP4's codes and scales, after the name of the tensor."""
INVERSE = "_scale_inv"
"""End of the name of a float8 weight's scales, after that of the weight."""
MXFP4, FP8 = "mxfp4", "fp8"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Values of MXFP4's codes without a sign (OCP Microscaling Formats 1.0, 2023)."""
E8M0_BIAS = 127
Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedEntry(WeightEntry):
    """Location of a quantised tensor; its shape is that of the tensor, and its codes are in ``file``.

    Attributes:
        scales: Location of the scales.
        codes: Location of the codes.
        multiply: Function from codes and scales to float32 values, [*shape].
    """

    codes: WeightEntry
    scales: WeightEntry
    multiply: Callable[[Array, Array], Array]

    def read(self) -> Array:
        """Read and multiply out the values, [*shape] float32."""
        return self.multiply(self.codes.read(), self.scales.read())


def common_dtype(entries: Mapping[str, WeightEntry]) -> str:
    """Return the checkpoint format that holds all weights without rounding."""
    return common_format(
        {
            "bfloat16" if isinstance(entry, QuantizedEntry) else entry.dtype
            for entry in entries.values()
        }
    )


def quantization_faults(config: Config) -> Iterator[Fault]:
    """Yield the fault of a quantisation that is not known, by the settings of a config.json."""
    settings = config.get("quantization_config")
    if settings is None:
        return
    kind = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if kind == MXFP4 or (kind == FP8 and _block_of(settings) is not None):
        return
    yield Fault(
        fact=f"config.json has quantization_config={settings!r}",
        rule="weights may be in mxfp4, or in fp8 with a weight_block_size of two whole numbers",
        remedy="take unquantised weights, or save the model unquantised first",
    )


def _block_of(settings: Config) -> tuple[int, int] | None:
    """Return the height and width of float8's blocks, or None where there are none."""
    match settings.get("weight_block_size"):
        case [int(height), int(width)] if height > 0 and width > 0:
            return height, width
    return None


def plain_entries(entries: Mapping[str, WeightEntry], config: Config) -> dict[str, WeightEntry]:
    """Return the tensors of a folder with its quantised ones under their own names.

    Args:
        entries: Location of each tensor in the folder, codes and scales included.
        config: Content of config.json.

    Raises:
        ConfigError: A tensor is in codes without scales, or their shapes do not fit.
    """
    settings = config.get("quantization_config") or {}
    found = dict(entries)
    # MXFP4: codes and scales have names of their own, and become one tensor
    if settings.get("quant_method") == MXFP4:
        for name in [name for name in entries if name.endswith(BLOCKS)]:
            whole = name.removesuffix(BLOCKS)
            if f"{whole}{SCALES}" in entries:
                found[whole] = _mxfp4_entry(found.pop(name), found.pop(f"{whole}{SCALES}"))
    # float8: codes have the weight's own name, scales lie beside it
    block = _block_of(settings)
    if settings.get("quant_method") == FP8 and block is not None:
        for name in [name for name in entries if name.endswith(INVERSE)]:
            whole = name.removesuffix(INVERSE)
            if whole in entries:
                found[whole] = _fp8_entry(found[whole], found.pop(name), block)
    # what is still in codes has no scales
    left = {name: entry for name, entry in found.items() if entry.dtype not in PLAIN_FORMATS}
    raise_faults(ConfigError, [_without_scales(name, entry) for name, entry in left.items()])
    return found


def _mxfp4_entry(codes: WeightEntry, scales: WeightEntry) -> WeightEntry:
    """Return the entry of [..., in, out], of codes [..., out, in / 32, 16] and scales [..., out, in / 32]."""
    *outer, rows, groups, size = codes.shape
    if codes.dtype != "uint8" or scales.dtype != "uint8" or scales.shape != codes.shape[:-1]:
        raise ConfigError(_unfit(codes, scales, "a scale for each row of codes, all of 8 bits"))
    shape = (*outer, groups * size * 2, rows)
    return _entry(codes, scales, shape, mxfp4_values)


def _fp8_entry(codes: WeightEntry, scales: WeightEntry, block: tuple[int, int]) -> WeightEntry:
    """Return the entry of a weight [out, in] of float8, with a scale for each block of it."""
    wanted = tuple(-(-size // of) for size, of in zip(codes.shape, block, strict=False))
    is_float8, is_plain = codes.dtype == "float8_e4m3fn", scales.dtype in PLAIN_FORMATS
    if not is_float8 or not is_plain or len(codes.shape) != len(block) or scales.shape != wanted:
        raise ConfigError(
            _unfit(codes, scales, f"e4m3 codes and scales {wanted} for blocks {block}")
        )

    def multiply(coded: Array, scaling: Array) -> Array:
        return fp8_values(coded, scaling, block)

    return _entry(codes, scales, codes.shape, multiply)


def _entry(
    codes: WeightEntry,
    scales: WeightEntry,
    shape: tuple[int, ...],
    multiply: Callable[[Array, Array], Array],
) -> QuantizedEntry:
    return QuantizedEntry(
        dtype="float32", shape=shape, file=codes.file, start=codes.start, codes=codes, scales=scales,
        multiply=multiply,
    )  # fmt: skip


def mxfp4_values(codes: Array, scales: Array) -> Array:
    """Return the values [..., in, out] float32 of MXFP4 weights.

    Args:
        codes: Two e2m1 codes a byte, the lower half first, [..., out, in / 32, 16] uint8.
        scales: Exponent of each block of 32 along in, in e8m0, [..., out, in / 32] uint8.
    """
    # the highest of a code's four bits is its sign
    signed = np.concatenate((E2M1, -E2M1))
    pairs = np.stack((codes & 0x0F, codes >> 4), -1)
    with np.errstate(over="ignore"):  # the largest are infinite in float32
        values = np.ldexp(signed[pairs], (scales.astype(np.int32) - E8M0_BIAS)[..., None, None])
    return values.reshape(*codes.shape[:-2], -1).swapaxes(-1, -2)


def fp8_values(codes: Array, scales: Array, block: tuple[int, int]) -> Array:
    """Return the values [out, in] float32 of a weight in e4m3 with scales in blocks.

    Args:
        codes: Bits of the weight, [out, in] uint8.
        scales: Scale of each block, [ceil(out / height), ceil(in / width)].
        block: Height and width of a block.
    """
    values = _E4M3[codes]
    wide = scales.astype(np.float32)
    for row in range(wide.shape[0]):  # bounds the temporaries: a row of blocks
        at = slice(row * block[0], (row + 1) * block[0])
        values[at] *= wide[row].repeat(block[1])[: codes.shape[1]]
    return values


def _e4m3_table() -> Array:
    """Return the values of the 256 codes of e4m3 without infinities (OCP 8-bit floating point, 2023)."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 0xF, codes & 0x7
    # normal numbers, and subnormal ones where the exponent is 0
    values = np.where(
        exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6)
    )
    values[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes > 0x7F, -values, values).astype(np.float32)  # the sign bit


_E4M3 = _e4m3_table()


def _unfit(codes: WeightEntry, scales: WeightEntry, rule: str) -> Fault:
    return Fault(
        fact=f"{codes.file.name} has codes {codes.shape} of {codes.dtype} with scales {scales.shape} of {scales.dtype}",
        rule=f"by quantization_config they are {rule}",
        remedy="take config.json from the same place as the weights",
    )


def _without_scales(name: str, entry: WeightEntry) -> Fault:
    return Fault(
        fact=f"{name} has {entry.dtype} in {entry.file.name}",
        rule="codes need scales beside them, and a quantization_config in config.json that names their kind",
        remedy="take config.json from the same place as the weights",
    )
