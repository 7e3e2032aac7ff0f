"""fp8: tensors of 8-bit values with scales, and their matrix products.

A number is a value times a scale; a scale belongs to a whole tensor or to one row. Values are e4m3 (3 bits
of fraction, up to 448) or e5m2 (2 bits, up to 57344): Micikevicius et al., FP8 formats for deep learning,
2022. GPUs with fp8 tensor cores use them. Other GPUs and CPUs multiply the same values in float32 or
float64: slower than without fp8, but equal to the GPU's result up to the rounding of sums. Only this
module and `expert_parallel/fp8_grouped_gemm.py` tell the two apart.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from raymega.parallel.comm.work import Work
from raymega.parallel.core.compile import fused
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel

logger = logging.getLogger(__name__)

FORWARD = torch.float8_e4m3fn
GRADIENT = torch.float8_e5m2
FIRST_CAPABILITY = (8, 9)
"""Lowest compute capability of GPUs with fp8 products: Ada's; Hopper has 9.0."""
MULTIPLE = 16
"""Number that must divide the inner dimension and the columns of such a product."""


class Fp8Tensor(NamedTuple):
    """The product of ``values`` [..., N] in fp8 and ``scale``: [..., 1] by row, or [1, ..., 1] for all."""

    values: Tensor
    scale: Tensor

    def flat(self) -> Fp8Tensor:
        """Return the tensor with leading dims flattened, [..., N] -> [R, N]; the scale is [R, 1] or [1, 1]."""
        return Fp8Tensor(self.values.flatten(0, -2), self.scale.flatten(0, -2))

    def turned(self) -> Fp8Tensor:
        """Return the contiguous transpose [N, R] of [R, N]; only with one scale for all."""
        return Fp8Tensor(self.values.t().contiguous(), self.scale)


def largest(x: Tensor, *, by_row: bool) -> Tensor:
    """Return the largest magnitude of each row, [..., N] -> [..., 1], or of all, as [1, ..., 1]."""
    if by_row:
        return x.abs().amax(-1, keepdim=True)
    return x.abs().amax().reshape((1,) * x.ndim)


def scale_for(most: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales that map the largest magnitudes ``most`` to the largest value of ``dtype``."""
    # The smallest normal number instead of 0, so that rows of zeros divide by no zero.
    wide = torch.promote_types(most.dtype, torch.float32)
    return (most.to(wide) / torch.finfo(dtype).max).clamp_min(torch.finfo(wide).tiny)


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype, *, is_fused: bool = False) -> Fp8Tensor:
    """Return ``x`` in fp8. NaN stays NaN, and an infinity makes its row (or tensor) NaN."""
    values = fused(_rounded, is_on=is_fused and x.is_cuda)(x, scale, dtype)
    return Fp8Tensor(values, scale)


def quantise_rows(x: Tensor, dtype: torch.dtype, *, is_fused: bool = False) -> Fp8Tensor:
    """Return ``x`` in fp8 with a scale for each of its rows, which no other rank holds a part of.

    Compiled it is one kernel, which reads ``x`` once and writes a byte a number.
    """
    return Fp8Tensor(*fused(_rounded_rows, is_on=is_fused and x.is_cuda)(x, dtype))


def _rounded_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = scale_for(largest(x, by_row=True), dtype)
    return _rounded(x, scale, dtype), scale


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    # one wide tensor and no more: of experts' weights it is four times the result
    return (x / scale).clamp_(-limit, limit).to(dtype)


def rounding_margin(x: Tensor, scale: Tensor, dtype: torch.dtype) -> float:
    """Return the smallest distance of a number from the midpoint between two fp8 values.

    It is a share of the format's range: perturbations far smaller than that change no fp8 value.
    """
    info = torch.finfo(dtype)
    numbers = (x / scale).abs()
    _, exponents = torch.frexp(numbers.clamp_min(info.tiny))  # frexp's fractions are in [1/2, 1)
    steps = torch.ldexp(torch.full_like(numbers, info.eps), exponents - 1)
    halfway = (numbers / steps).frac().sub_(0.5).abs_().mul_(steps)
    return float(halfway.min() / info.max)


def product(a: Fp8Tensor, b: Fp8Tensor, dtype: torch.dtype, *, is_fast: bool = False) -> Tensor:
    """Return a b^T of contiguous a [M, K] and b [N, K] -> [M, N] in ``dtype``.

    Sums are in float32, or in float64 where the scales are; the result is rounded once. With ``is_fast`` a GPU
    keeps sums in its tensor cores, with fewer digits, instead of adding them up in float32 now and then: for
    outputs, as Transformer Engine does, not for gradients.
    """
    if _has_kernel(a, b, dtype):
        return torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=dtype,
            use_fast_accum=is_fast,
        )  # fmt: skip
    # emulation
    wide = a.scale.dtype
    sums: Tensor = a.values.to(wide) @ b.values.to(wide).t()
    return sums.mul_(a.scale).mul_(b.scale.t()).to(dtype)


def start_gather(
    x: Fp8Tensor, sp: SequenceParallel, *, by_row: bool
) -> tuple[Fp8Tensor, list[Work]]:
    """Start to gather all positions: values [S/sp, B, N] -> [S, B, N], one byte each.

    Read the result only after all returned operations. gloo has no fp8, so values travel as uint8.
    """
    values, travelling = sp.start_gather(x.values.view(torch.uint8))
    pending, scale = [travelling], x.scale
    if by_row:
        scale, travelling = sp.start_gather(x.scale)
        pending.append(travelling)
    return Fp8Tensor(values.view(x.values.dtype), scale), pending


def _has_kernel(a: Fp8Tensor, b: Fp8Tensor, dtype: torch.dtype) -> bool:
    # limits of torch's _scaled_mm
    device = a.values.device
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    reason = _obstacle(device)
    if not reason and (a.values.shape[1] % MULTIPLE or b.values.shape[0] % MULTIPLE):
        reason = f"sizes that are no multiples of {MULTIPLE}"
    if reason:
        _tell(reason)
    return not reason


@cache
def _obstacle(device: torch.device) -> str:
    """Return the reason why this GPU has no fp8 products; '' if it has."""
    found = torch.cuda.get_device_capability(device)
    return "" if found >= FIRST_CAPABILITY else f"a GPU of compute capability {found[0]}.{found[1]}"


@cache
def _tell(reason: str) -> None:
    """Log once in a process, for each reason, that fp8 products are emulated."""
    logger.warning("fp8 products are emulated in float32, which is slow: %s", reason)
