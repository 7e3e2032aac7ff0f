"""Functions whose backward needs less than autograd would keep for them, each computed as written.

They own their derivatives and know nothing of layers or layouts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; x: [..., N], weight: x's last dims."""
    # Torch has one kernel for this on GPUs only. Elsewhere it is a chain of operations that keeps
    # 10 bytes an element of bf16, where x alone would do.
    if x.is_cuda:
        if weight.dim() == 1:
            return torch_rms_norm(x, weight.shape, weight, eps)
        return torch_rms_norm(x, weight.shape[-1:], None, eps) * weight
    return _RmsNorm.apply(x, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [..., 2 N], gate first -> [..., N]."""
    return _Swiglu.apply(gate_up)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; both of one shape."""
    return _SiluProduct.apply(gate, up)


class _RmsNorm(torch.autograd.Function):
    """Keeps x and 1 / rms(x), one number a row; computed in max(fp32, dtype)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x / rms(x): dx = (g w - n mean(g w n)) / rms(x), dw = sum of g n over rows."""
        x, weight, inverse = ctx.saved_tensors
        normal = x.to(inverse.dtype) * inverse
        grad = grad.to(inverse.dtype)
        product = grad * normal
        grad_weight = product.flatten(0, -weight.dim() - 1).sum(0)
        along = product.mul_(weight).mean(-1, keepdim=True)
        grad_x = (grad * weight).addcmul_(normal, along, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _Swiglu(torch.autograd.Function):
    """Keeps gate and up; silu(gate), as large as either, is made again from gate."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


class _SiluProduct(torch.autograd.Function):
    """The same for tensors of their own."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up
