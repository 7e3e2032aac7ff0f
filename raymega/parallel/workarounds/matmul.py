"""Matrix products by the fastest way on this machine, without autograd.

A CPU without 16-bit instructions multiplies 16-bit numbers in float32: torch would multiply them one by one.
Sums are in float32 and the result is rounded once, as with such instructions. Goes when torch multiplies
16 bits on such CPUs as fast.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from raymega.parallel.workarounds.output_cache import LEAST_BYTES, CpuOutputCache


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, kept: CpuOutputCache | None = None
) -> Tensor:
    """Return x W^T + b. x: [..., in], weight: [out, in], bias: [out] or None -> [..., out].

    On CPUs large results get their memory from ``kept``, if it is given.
    """
    if is_emulated(x):
        wide_bias = None if bias is None else bias.float()
        return project(x.float(), weight.float(), wide_bias, kept).to(x.dtype)
    if kept is None:
        return linear(x, weight, bias)
    # a small result, or a GPU: torch allocates it
    num_bytes = x.numel() // x.shape[-1] * weight.shape[0] * x.element_size()
    if not x.is_cpu or num_bytes < LEAST_BYTES:
        y = linear(x, weight)
    else:
        y = kept.empty((*x.shape[:-1], weight.shape[0]), x.dtype)
        torch.mm(x.flatten(0, -2), weight.T, out=y.view(-1, weight.shape[0]))
    # not linear's own bias, which gives a view: the loss overwrites logits, and no Function's view may be
    return y if bias is None else y.add_(bias)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W. x: [..., out], weight: [out, in] -> [..., in]."""
    if is_emulated(x):
        return (x.float() @ weight.float()).to(x.dtype)
    return x @ weight


def product_into(y: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> None:
    """Write x M + b to ``y``, without autograd. x: [T, in], matrix: [in, out], bias: [out] or None, y: [T, out]."""
    if is_emulated(x):
        x, matrix = x.float(), matrix.float()
        y.copy_(x @ matrix if bias is None else torch.addmm(bias.float(), x, matrix))
    elif bias is None:
        torch.mm(x, matrix, out=y)
    else:
        torch.addmm(bias, x, matrix, out=y)


def batch_product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x M in one call for rows that lie apart. x: [N, T, in], matrix: [in, out] -> [N, T, out]."""
    if is_emulated(x):
        return product(x, matrix)
    y = x.new_empty((*x.shape[:2], matrix.shape[1]))
    # torch looks in Python for a kernel of bmm without out: it takes longer than the rest of the call
    return torch.bmm(x, matrix.expand(x.shape[0], -1, -1), out=y)


def outer(grad: Tensor, x: Tensor) -> Tensor:
    """Return the sum of outer products of rows. grad: [T, out], x: [T, in] -> [out, in]."""
    return product(grad.T, x)


def add_outer(total: Tensor, grad: Tensor, x: Tensor, *, is_first: bool) -> None:
    """Add :func:`outer` to ``total`` [out, in], or overwrite it with the first term.

    A float32 total gets unrounded sums on GPUs and where 16-bit products are emulated; elsewhere a total
    of another format gets the product rounded to the format of ``x``.
    """
    if x.is_cuda and x.dtype.itemsize == 2 and total.dtype == torch.float32:
        # cuBLAS adds to a wider output in the pass that computes the product; torch has no such CPU kernel
        if is_first:
            torch.ops.aten.mm.dtype_out(grad.T, x, total.dtype, out=total)
        else:
            torch.ops.aten.addmm.dtype_out(total, grad.T, x, total.dtype, out=total)
        return
    if is_emulated(x) and total.dtype == torch.float32:
        grad, x = grad.float(), x.float()
    # another format: a product, then a sum; else accumulate in the GEMM
    if total.dtype != x.dtype:
        made = outer(grad, x)
        _ = total.copy_(made) if is_first else total.add_(made)
    elif is_first:
        torch.mm(grad.T, x, out=total)
    else:
        total.addmm_(grad.T, x)


def is_emulated(x: Tensor) -> bool:
    """Return whether numbers of x's format are multiplied in float32 on its device."""
    return x.is_cpu and x.dtype.itemsize == 2 and not _has_instructions(x.dtype)


@cache
def _has_instructions(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
