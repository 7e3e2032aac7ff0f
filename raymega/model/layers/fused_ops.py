"""Functions whose backward needs less than autograd would keep for them, each computed as written.

They own their derivatives and know nothing of layers or layouts. A weight's gradient is a sum over rows, in
float32 or wider, and is added to the run's sums as it is: a narrow format may not hold it.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu

from raymega.parallel.core.compile import fused
from raymega.parallel.core.weight_grads import ComputedTerm, accumulate_grad

GELU_FACTOR, GELU_CUBE = sqrt(2 / pi), 0.044715
"""Of the tanh form's u(x) = factor (x + cube x^3), by Hendrycks and Gimpel 2016."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_fused: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; x: [..., N], weight: x's last dims."""
    # Torch has one kernel for this on GPUs only. Elsewhere it is a chain of operations that keeps
    # 10 bytes an element of bf16, where x alone would do.
    if x.is_cuda:
        if weight.dim() == 1:
            return torch_rms_norm(x, weight.shape, weight, eps)
        return torch_rms_norm(x, weight.shape[-1:], None, eps) * weight
    return _RmsNorm.apply(x, weight, eps, is_fused)


def swiglu(gate_up: Tensor, *, is_fused: bool = False) -> Tensor:
    """silu(gate) * up. gate_up: [..., 2 N], gate first -> [..., N]."""
    return _Swiglu.apply(gate_up, is_fused)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of x + bias in its tanh form, fused. x: [..., N], bias: [N] -> [..., N]."""
    return _BiasGelu.apply(x, bias)


class _RmsNorm(torch.autograd.Function):
    """Keeps x and 1 / rms(x), one number a row; computed in max(fp32, dtype)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, is_fused: bool) -> Tensor:  # noqa: FBT001
        make = fused(_rms_norm, is_on=True) if is_fused else _rms_norm_in_steps
        y, inverse = make(x.detach(), weight.detach(), eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.param, ctx.is_fused = weight, is_fused
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        is_narrow = x.dtype != inverse.dtype or weight.dim() > 1
        if not ctx.is_fused and not is_narrow:
            return *_rms_norm_gradients_in_steps(grad, x, weight, inverse), None, None
        make = fused(_rms_norm_gradients, is_on=ctx.is_fused)
        grad_x, wide = make(grad, x.detach(), weight.detach(), inverse)
        return grad_x, accumulate_grad(ctx.param, ComputedTerm(lambda: wide)), None, None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and 1 / rms(x) [..., 1] in max(fp32, dtype)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse).mul_(weight).to(x.dtype), inverse


def _rms_norm_in_steps(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same by the fewest of torch's own kernels."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).mul_(weight).to(x.dtype), inverse


def _rms_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """With n = x / rms(x): dx = (g w - n mean(g w n)) / rms(x), dw = sum of g n over rows, in float32 or wider."""
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
    """The same for one weight and one format, by torch's kernel for LayerNorm.

    With a mean of 0 it differs in what it takes out of dx: the mean of g w over a row.
    """
    size = weight.shape[0]
    grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
        grad, x, [size], torch.zeros_like(inverse), inverse, weight, None, [True, True, False]
    )
    taken = (grad @ weight).unsqueeze(-1).mul_(inverse).div_(size)
    return grad_x.add_(taken), grad_weight


class _Swiglu(torch.autograd.Function):
    """Keeps gate and up; silu(gate), as large as either, is made again from gate."""

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
    """:func:`swiglu`, of which autograd is not told; into ``out`` [..., N] where there is one."""
    gate, up = gate_up.chunk(2, dim=-1)
    share = silu(gate) if out is None else torch.ops.aten.silu.out(gate, out=out)
    return share.mul_(up)


def _swiglu_gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    """With s = sigmoid(gate): d up = g gate s, d gate = g up s (1 + gate (1 - s))."""
    gate, up = gate_up.chunk(2, dim=-1)
    share = gate.sigmoid()
    grad_gate = grad * up * share * (1 + gate * (1 - share))
    return torch.cat((grad_gate, grad * gate * share), -1)


def swiglu_gradient(grad: Tensor, gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Backward of :func:`swiglu` by the fewest of torch's own kernels, each of which writes where its result belongs."""
    gate, up = gate_up.chunk(2, dim=-1)
    grad_gate_up = torch.empty_like(gate_up) if out is None else out
    grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
    share = gate.sigmoid()
    torch.mul(gate, share, out=grad_up).mul_(grad)
    # g s (1 + gate (1 - s)) = d up + s (g - d up)
    torch.lerp(grad_up, grad, share, out=grad_gate).mul_(up)
    return grad_gate_up


class _BiasGelu(torch.autograd.Function):
    """Keeps x, without the bias."""

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
    """0.5 x (1 + tanh(u)) is x sigmoid(2 u), which takes one exponential."""
    wide = (x + bias).to(torch.promote_types(x.dtype, torch.float32))
    return (wide * _gelu_share(wide)).to(x.dtype)


def _gelu_gradients(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """With s = sigmoid(2 u(x)): dx = g (s + x s (1 - s) 2 u'(x)); the bias's is its sum, in float32 or wider."""
    wide = (x + bias).to(torch.promote_types(x.dtype, torch.float32))
    share = _gelu_share(wide)
    slope = 2 * GELU_FACTOR * (1 + 3 * GELU_CUBE * wide.square())
    grad_x = (grad * (share + wide * share * (1 - share) * slope)).to(x.dtype)
    return grad_x, grad_x.flatten(0, -2).sum(0, dtype=wide.dtype)


def _gelu_share(wide: Tensor) -> Tensor:
    return (2 * GELU_FACTOR * wide * (1 + GELU_CUBE * wide.square())).sigmoid()
