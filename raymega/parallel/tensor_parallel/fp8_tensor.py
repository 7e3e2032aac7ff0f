"""fp8: tensors of 8-bit numbers with scales, and matrix products of them.

A number is a value times a scale; a scale belongs to a whole tensor or to one of its rows. Values are e4m3
(3 bits of fraction, up to 448) or e5m2 (2 bits, up to 57344): Micikevicius et al., FP8 formats for deep
learning, 2022. A GPU with such products makes them in its tensor cores. Everywhere else, CPUs among
it, the same values are multiplied in float32 or float64, which is slower than without fp8 and gives what a
GPU gives up to the rounding of sums. This module is the one place that knows which of the two it is.
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
"""Of NVIDIA's GPUs with fp8 products: Ada's; Hopper has 9.0."""
MULTIPLE = 16
"""Of inner dimensions and columns in such a product."""


class Fp8Tensor(NamedTuple):
    """``values`` [..., N] in fp8 times ``scale``, [..., 1] by row or as many ones for all alike."""

    values: Tensor
    scale: Tensor

    def flat(self) -> Fp8Tensor:
        """[..., N] -> [R, N]; the scale [R, 1] or [1, 1]."""
        return Fp8Tensor(self.values.flatten(0, -2), self.scale.flatten(0, -2))

    def turned(self) -> Fp8Tensor:
        """[R, N] with one scale -> its transpose [N, R], end to end in memory."""
        return Fp8Tensor(self.values.t().contiguous(), self.scale)


def largest(x: Tensor, *, by_row: bool) -> Tensor:
    """Largest magnitude of each row, [..., N] -> [..., 1], or of all: as many ones as dimensions."""
    if by_row:
        return x.abs().amax(-1, keepdim=True)
    return x.abs().amax().reshape((1,) * x.ndim)


def scale_for(most: Tensor, dtype: torch.dtype) -> Tensor:
    """What numbers of largest magnitudes ``most`` are divided by to end where ``dtype`` does."""
    wide = torch.promote_types(most.dtype, torch.float32)
    return (most.to(wide) / torch.finfo(dtype).max).clamp_min(torch.finfo(wide).tiny)


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype, *, is_fused: bool = False) -> Fp8Tensor:
    """``x`` in fp8. What is not a number stays none, and with an infinity nor is its row."""
    values = fused(_rounded, is_on=is_fused and x.is_cuda)(x, scale, dtype)
    return Fp8Tensor(values, scale)


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return (x.to(scale.dtype) / scale).clamp(-limit, limit).to(dtype)


def rounding_margin(x: Tensor, scale: Tensor, dtype: torch.dtype) -> float:
    """How near a number came to where it would have been rounded to the other neighbour.

    As a share of the range: what changes all numbers by far less changes no value in fp8.
    """
    info = torch.finfo(dtype)
    numbers = (x / scale).abs()
    _, exponents = torch.frexp(numbers.clamp_min(info.tiny))  # of numbers in [1/2, 1)
    steps = torch.ldexp(torch.full_like(numbers, info.eps), exponents - 1)
    halfway = (numbers / steps).frac().sub_(0.5).abs_().mul_(steps)
    return float(halfway.min() / info.max)


def product(a: Fp8Tensor, b: Fp8Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T of a: [M, K] and b: [N, K], both end to end in memory -> [M, N] in ``dtype``.

    Sums are float32, or float64 where scales are; the result is rounded once.
    """
    if _has_kernel(a, b, dtype):
        return torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=dtype
        )
    wide = a.scale.dtype
    sums: Tensor = a.values.to(wide) @ b.values.to(wide).t()
    return sums.mul_(a.scale).mul_(b.scale.t()).to(dtype)


def start_gather(
    x: Fp8Tensor, sp: SequenceParallel, *, by_row: bool
) -> tuple[Fp8Tensor, list[Work]]:
    """Begin to bring all positions together: values [S/sp, B, N] -> [S, B, N], a byte each.

    The result may be read when all were waited for. gloo knows no fp8, so values go as bytes.
    """
    values, travelling = sp.start_gather(x.values.view(torch.uint8))
    pending, scale = [travelling], x.scale
    if by_row:
        scale, travelling = sp.start_gather(x.scale)
        pending.append(travelling)
    return Fp8Tensor(values.view(x.values.dtype), scale), pending


def _has_kernel(a: Fp8Tensor, b: Fp8Tensor, dtype: torch.dtype) -> bool:
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
    """Why this GPU multiplies no fp8; '' if it does."""
    found = torch.cuda.get_device_capability(device)
    return "" if found >= FIRST_CAPABILITY else f"a GPU of compute capability {found[0]}.{found[1]}"


@cache
def _tell(reason: str) -> None:
    """Once in a process."""
    logger.warning("fp8 products are emulated in float32, which is slow: %s", reason)
