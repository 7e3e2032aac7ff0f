"""Recomputation of single tensors: their inputs are saved instead, and backward computes them again.

`checkpoint_output` runs a function without its graph. `recompute_input` runs a layer on the output,
and lets autograd save a note instead of the tensor. When backward reaches the layer, the note runs the
function again, now with its graph, through which the gradient continues. It works for any layer,
tensor-parallel or not. Whole blocks use torch.utils.checkpoint (see `model/pipeline_stage.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from raymega.parallel.workarounds.autograd_engine import find_gradients


def checkpoint_output(
    make: Callable[..., Tensor], *inputs: Tensor, params: tuple[Tensor, ...] = ()
) -> Tensor:
    """Return ``make(*inputs)``, for one :func:`recompute_input`; backward runs ``make`` a second time.

    Args:
        make: Deterministic function that returns a contiguous tensor.
        inputs: Tensors that are saved for backward.
        params: Parameters that ``make`` also reads; they get their gradients as usual.
    """
    if not torch.is_grad_enabled():
        return make(*inputs)
    return _Produce.apply(make, len(inputs), *inputs, *params)


def recompute_input(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``layer(x)``; where x comes from :func:`checkpoint_output`, the layer does not save it."""
    node: Any = x.grad_fn
    if not hasattr(node, "make_again"):
        return layer(x)
    # A layer may save views of x: whatever shares its storage is replaced by a note.
    storage = x.untyped_storage().data_ptr()

    def pack(saved: Tensor) -> Tensor | _Note:
        if saved.untyped_storage().data_ptr() != storage:
            return saved
        return _Note(node, saved.shape, saved.stride(), int(saved.storage_offset()))

    with saved_tensors_hooks(pack, _unpack):
        return layer(x)


@dataclass(frozen=True, slots=True)
class _Note:
    """Placeholder for a saved tensor, a view of the output of ``node``."""

    node: Any
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(saved: Tensor | _Note) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    again = saved.node.make_again(saved.node).detach()
    return again.as_strided(saved.shape, saved.stride, saved.offset)


def _make_again(ctx: Any) -> Tensor:
    """Return the recomputed output with its graph down to ``ctx.leaves``, cached until backward uses it."""
    if ctx.again is None:
        saved = ctx.saved_tensors
        # Detached leaves: the backward of _Produce continues to the true inputs.
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in saved[: ctx.num_inputs]]
        ctx.leaves = (*inputs, *saved[ctx.num_inputs :])
        with torch.enable_grad():
            ctx.again = ctx.make(*inputs)
    again: Tensor = ctx.again
    return again


class _Produce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Tensor], num_inputs: int, *tensors: Tensor) -> Tensor:
        ctx.make, ctx.num_inputs, ctx.again = make, num_inputs, None
        ctx.save_for_backward(*tensors)
        ctx.make_again = _make_again
        return make(*tensors[:num_inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        again, leaves = _make_again(ctx), ctx.leaves
        ctx.again = ctx.leaves = None
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        # None for a parameter whose gradient was added to the run's sums on the way.
        gradients = iter(find_gradients(again, wanted, grad))
        return (None, None, *(next(gradients) if t.requires_grad else None for t in leaves))
