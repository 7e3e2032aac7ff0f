"""Clamped SwiGLU of GPT-OSS, as an autograd function that saves gate and up alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def clamped_swiglu(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Return g sigmoid(alpha g) (u + 1), [..., N], of gate_up [..., 2 N], gate first.

    g is the gate, at most ``limit``, and u is up within [-limit, limit] (GPT-OSS's model card, 2025).
    """
    return _ClampedSwiglu.apply(gate_up, alpha, limit)


class _ClampedSwiglu(torch.autograd.Function):
    """Clamped SwiGLU whose backward computes the sigmoid again."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.alpha, ctx.limit = alpha, limit
        gate, up = _clamped(gate_up.detach(), limit)
        return (gate * alpha).sigmoid_().mul_(gate).mul_(up.add_(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,), limit = ctx.saved_tensors, ctx.limit
        gate, up = _clamped(gate_up, limit)
        share = (gate * ctx.alpha).sigmoid_()
        # d g = grad (u + 1) s (1 + alpha g (1 - s)), d u = grad g s; 0 beyond the limits
        by_gate = grad * share * (1 + ctx.alpha * gate * (1 - share)) * up.add(1)
        by_up = grad * gate * share
        raw_gate, raw_up = gate_up.chunk(2, dim=-1)
        by_gate.masked_fill_(raw_gate > limit, 0.0)
        by_up.masked_fill_(raw_up.abs() > limit, 0.0)
        return torch.cat((by_gate, by_up), -1), None, None


def _clamped(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return gate and up within their limits, as new tensors."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)
