"""DoRA (Liu et al. 2024): rows of W + scale B A with trained norms, as in Hugging Face's PEFT.

With z = (W + scale B A) x the layer gives magnitude / norm * z, for each output feature. The norm is that of the
row of W + scale B A now, and a constant for the gradient (section 4.3 of the paper).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.weight_grads import ComputedTerm, accumulate_grad


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float, inner: Group | None) -> Tensor:
    """Return the norm of each row of W + scale B A, without the product B A.

    |w + s b A|^2 = |w|^2 + s b . (2 A w + s A A^T b), for a row w of W and a row b of B.

    Args:
        weight: W [out, in], or of experts [E, out, in].
        a: A [r, in], or [E, r, in].
        b: B [out, r], or [E, out, r].
        scale: Factor on B A.
        inner: Ranks that hold the other input features, whose squares are added; None for the rank alone.

    Returns:
        [out], or [E, out], in float32 or better; above 0.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    across, own, b = (weight @ a.mT).to(wide), a.to(wide), b.to(wide)
    mixed = 2 * across + scale * (b @ (own @ own.mT))
    squares = torch.linalg.vector_norm(weight, dim=-1, dtype=wide).square()
    squares += scale * (b * mixed).sum(-1)
    if inner is not None and inner.size > 1:
        all_reduce(squares, inner)
    return squares.clamp_(min=torch.finfo(wide).tiny).sqrt_()


def rescaled(
    z: Tensor, magnitude: Tensor, norms: Tensor, *, counts: Tensor | None = None
) -> Tensor:
    """Return magnitude / norm * z for each output feature.

    Args:
        z: Outputs [..., out], or rows [R, out] sorted by expert.
        magnitude: Trained norms [out], or [E, out].
        norms: Norms that the rows have, of the same shape, from :func:`row_norms`.
        counts: Number of rows of each expert, [E] int64; None of a layer that is no expert's.
    """
    return _Rescaled.apply(z, magnitude, norms, counts)


class _Rescaled(torch.autograd.Function):
    """Product whose gradient of the magnitudes is a sum over tokens, in max(fp32, dtype)."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, magnitude: Tensor, norms: Tensor, counts: Tensor | None
    ) -> Tensor:
        # what is beyond 1, because a narrow format has few digits near it
        beyond = (magnitude.detach() / norms - 1).to(z.dtype)
        ctx.save_for_backward(z, beyond, norms)
        ctx.param, ctx.counts = magnitude, counts
        return torch.addcmul(z, z, _by_row(beyond, counts, z))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (z, beyond, norms), counts = ctx.saved_tensors, ctx.counts

        def term() -> Tensor:
            products = (grad * z).to(norms.dtype)
            if counts is None:
                return products.flatten(0, -2).sum(0) / norms
            sums = torch.segment_reduce(
                products, "sum", lengths=counts, axis=0, unsafe=True, initial=0.0
            )
            return sums / norms

        grad_z = torch.addcmul(grad, grad, _by_row(beyond, counts, grad))
        return grad_z, accumulate_grad(ctx.param, ComputedTerm(term)), None, None


def _by_row(factors: Tensor, counts: Tensor | None, rows: Tensor) -> Tensor:
    """Return the factors [out] of all rows, or those of each row's expert, [R, out]."""
    if counts is None:
        return factors
    return factors.repeat_interleave(counts, 0, output_size=rows.shape[0])
