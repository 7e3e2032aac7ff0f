"""RMSNorm, SwiGLU and biased GELU as autograd functions that save less than torch's composition.

Each derives its own backward. A weight's gradient is a sum over rows in float32 or wider. It goes into the
gradient buffer in that dtype, because a narrow dtype would round it.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from raymega.parallel.core.compile import fused
from raymega.parallel.core.weight_grads import ComputedTerm, accumulate_grad

GELU_FACTOR, GELU_CUBE = sqrt(2 / pi), 0.044715
"""Constants of the tanh form's u(x) = factor (x + cube x^3), by Hendrycks and Gimpel 2016."""


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, is_fused: bool = False, is_offset: bool = False
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim; weight has x's last dims.

    With ``is_offset`` the factor is 1 + weight.
    """
    return _RmsNorm.apply(x, weight, eps, is_fused, is_offset)


def swiglu(gate_up: Tensor, *, is_fused: bool = False) -> Tensor:
    """Return silu(gate) * up, [..., N], of gate_up [..., 2 N], gate first."""
    return _Swiglu.apply(gate_up, is_fused)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return the fused tanh-form GELU of x + bias; x: [..., N], bias: [N]."""
    return _BiasGelu.apply(x, bias)


class _RmsNorm(torch.autograd.Function):
    """RMSNorm that saves x and one 1 / rms(x) a row; computed in max(fp32, dtype)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        is_fused: bool,  # noqa: FBT001
        is_offset: bool,  # noqa: FBT001
    ) -> Tensor:
        eager = _rms_norm_of_torch if x.is_cuda else _rms_norm_in_steps
        make = fused(_rms_norm, is_on=True) if is_fused else eager
        y, inverse = make(x.detach(), _factors(weight, is_offset=is_offset), eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.param, ctx.is_fused, ctx.is_offset = weight, is_fused, is_offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        weight = _factors(weight, is_offset=ctx.is_offset)
        if x.is_cuda and not ctx.is_fused:
            # the weight's first: its wide product is freed before dx is made
            term = ComputedTerm(lambda: weight_gradient(grad, x, weight, inverse))
            grad_weight = accumulate_grad(ctx.param, term)
            grad_x = _rms_norm_gradient_of_torch(grad, x, weight, inverse)
            return grad_x, grad_weight, None, None, None
        # The LayerNorm kernel takes one dtype and a flat weight.
        is_narrow = x.dtype != inverse.dtype or weight.dim() > 1
        if not ctx.is_fused and not is_narrow:
            return *_rms_norm_gradients_in_steps(grad, x, weight, inverse), None, None, None
        make = fused(_rms_norm_gradients, is_on=ctx.is_fused)
        grad_x, wide = make(grad, x.detach(), weight, inverse)
        return grad_x, accumulate_grad(ctx.param, ComputedTerm(lambda: wide)), None, None, None


def _factors(weight: Tensor, *, is_offset: bool) -> Tensor:
    """Return the factors of the features, without autograd: 1 + weight in max(fp32, dtype).

    A narrow format has few digits near 1.
    """
    held = weight.detach()
    return 1 + held.to(torch.promote_types(held.dtype, torch.float32)) if is_offset else held


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm, and 1 / rms(x) [..., 1] in max(fp32, dtype); a form to compile."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse).mul_(weight).to(x.dtype), inverse


def _rms_norm_of_torch(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the same by torch's kernel, which GPUs alone have."""
    # It takes a flat weight of x's format; heads have one each, and 1 + weight is wider.
    is_flat = _is_flat(x, weight)
    y, inverse = torch.ops.aten._fused_rms_norm(
        x, weight.shape[-1:], weight if is_flat else None, eps
    )
    return y if is_flat else y.mul_(weight), inverse


def _is_flat(x: Tensor, weight: Tensor) -> bool:
    return weight.dim() == 1 and weight.dtype == x.dtype


def _rms_norm_gradient_of_torch(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """Return dx by torch's kernel. Its dw would be rounded to the format of the weight."""
    is_flat = _is_flat(x, weight)
    grad_x: Tensor = torch.ops.aten._fused_rms_norm_backward(
        grad if is_flat else (grad * weight).to(x.dtype), x, weight.shape[-1:], inverse,
        weight if is_flat else None, [True, False],
    )[0]  # fmt: skip
    return grad_x


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """Return dw = sum over rows of g x / rms(x), in max(fp32, dtype).

    A matrix product sums the rows: on a GPU torch's ``sum`` takes four times the bytes of x for partial sums.
    """
    wide = x.to(inverse.dtype, copy=True).mul_(grad)
    if weight.dim() == 1:
        return inverse.flatten() @ wide.flatten(0, -2)
    # a weight for each head: [H, 1, T] times [H, T, K]
    scales, products = (rows.flatten(0, -3).transpose(0, 1) for rows in (inverse, wide))
    return (scales.mT @ products).squeeze(1)


def _rms_norm_in_steps(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the same in the fewest eager kernels."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).mul_(weight).to(x.dtype), inverse


def _rms_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dx = (g w - n mean(g w n)) / rms(x) and dw = sum over rows of g n, with n = x / rms(x)."""
    normal = x.to(inverse.dtype) * inverse
    grad = grad.to(inverse.dtype)
    product = grad * normal
    grad_weight = product.flatten(0, -weight.dim() - 1).sum(0)
    along = product.mul_(weight).mean(-1, keepdim=True)
    grad_x = (grad * weight).addcmul_(normal, along, value=-1).mul_(inverse)
    return grad_x.to(x.dtype), grad_weight


def _rms_norm_gradients_in_steps(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same for a flat weight and one dtype, by torch's LayerNorm backward kernel.

    Called with a mean of 0, that kernel subtracts one term too much from dx: the row mean of g w.
    """
    size = weight.shape[0]
    grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
        grad, x, [size], torch.zeros_like(inverse), inverse, weight, None, [True, True, False]
    )
    # Add the subtracted term back: mean(g w) / rms(x).
    taken = (grad @ weight).unsqueeze(-1).mul_(inverse).div_(size)
    return grad_x.add_(taken), grad_weight


class _Swiglu(torch.autograd.Function):
    """SwiGLU that saves gate and up; backward recomputes silu(gate) from gate."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, is_fused: bool) -> Tensor:  # noqa: FBT001
        ctx.save_for_backward(gate_up)
        ctx.is_fused = is_fused
        return fused(swiglu_values, is_on=is_fused)(gate_up.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        if ctx.is_fused:
            return fused(_swiglu_gradient, is_on=True)(grad, gate_up.detach()), None
        return swiglu_gradient(grad, gate_up), None


def swiglu_values(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute :func:`swiglu` outside autograd; into ``out`` [..., N] if given."""
    gate, up = gate_up.chunk(2, dim=-1)
    share = silu(gate) if out is None else torch.ops.aten.silu.out(gate, out=out)
    return share.mul_(up)


def _swiglu_gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return d gate = g up s (1 + gate (1 - s)) and d up = g gate s, with s = sigmoid(gate)."""
    gate, up = gate_up.chunk(2, dim=-1)
    share = gate.sigmoid()
    grad_gate = grad * up * share * (1 + gate * (1 - share))
    return torch.cat((grad_gate, grad * gate * share), -1)


def swiglu_gradient(grad: Tensor, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the gradient of :func:`swiglu` in the fewest eager kernels, written in place."""
    gate, up = gate_up.chunk(2, dim=-1)
    grad_gate_up = torch.empty_like(gate_up) if out is None else out
    grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
    share = gate.sigmoid()
    torch.mul(gate, share, out=grad_up).mul_(grad)
    # g s (1 + gate (1 - s)) = d up + s (g - d up)
    torch.lerp(grad_up, grad, share, out=grad_gate).mul_(up)
    return grad_gate_up


class _BiasGelu(torch.autograd.Function):
    """Biased GELU that saves x without the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.param = bias
        return fused(_gelu, is_on=True)(x.detach(), bias.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, bias = ctx.saved_tensors
        grad_x, wide = fused(_gelu_gradients, is_on=True)(grad, x.detach(), bias.detach())
        return grad_x, accumulate_grad(ctx.param, ComputedTerm(lambda: wide))


def _gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return 0.5 x (1 + tanh(u)) as x sigmoid(2 u), which takes one exponential."""
    wide = (x + bias).to(torch.promote_types(x.dtype, torch.float32))
    return (wide * _gelu_share(wide)).to(x.dtype)


def _gelu_gradients(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return dx = g (s + x s (1 - s) 2 u'(x)), with s = sigmoid(2 u(x)), and its sum over rows."""
    wide = (x + bias).to(torch.promote_types(x.dtype, torch.float32))
    share = _gelu_share(wide)
    slope = 2 * GELU_FACTOR * (1 + 3 * GELU_CUBE * wide.square())
    grad_x = (grad * (share + wide * share * (1 - share) * slope)).to(x.dtype)
    return grad_x, grad_x.flatten(0, -2).sum(0, dtype=wide.dtype)


def _gelu_share(wide: Tensor) -> Tensor:
    return (2 * GELU_FACTOR * wide * (1 + GELU_CUBE * wide.square())).sigmoid()
