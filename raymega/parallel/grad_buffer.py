"""GradBuffer: where gradients are summed, over micro-batches and then over ranks, once a step.

What the sum is divided by is train.step's; who updates with it is optim's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from raymega.parallel.comm import all_reduce, start_all_reduce
from raymega.parallel.groups import Groups
from raymega.parallel.parameter import ShardedParameter

BUCKET_BYTES = 32 * 2**20


class GradBuffer:
    """One flat buffer in float32 or better, with a view for each parameter.

    Views lie in the order in which backward finishes them, last parameter first, and buckets end
    between views: so a bucket could be sent as soon as its last gradient is there. A hook adds each
    ``param.grad`` to its view and drops it; a parameter that got none keeps zeros.
    """

    def __init__(
        self, params: Sequence[ShardedParameter], *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        dtype = torch.float32
        for param in params:
            dtype = torch.promote_types(dtype, param.dtype)
        num_elements = sum(param.numel() for param in params)
        self._flat = torch.zeros(num_elements, dtype=dtype, device=params[0].device)
        self._views: dict[ShardedParameter, torch.Tensor] = {}
        start = 0
        for param in reversed(params):
            view = self._flat[start : start + param.numel()].view(param.shape)
            param.register_post_accumulate_grad_hook(_add_to(view))
            self._views[param] = view
            start += param.numel()
        self._buckets = torch.split(
            self._flat, _bucket_sizes(list(self._views.values()), bucket_bytes)
        )

    def view(self, param: ShardedParameter) -> torch.Tensor:
        """The summed gradient of ``param``, of its shape; always the same memory."""
        return self._views[param]

    def zero(self) -> None:
        """Forget the last step's sums."""
        self._flat.zero_()

    def reduce(self, groups: Groups) -> None:
        """Sum over data-parallel ranks, then over the two copies of a tied parameter.

        In that order both copies end with equal bits: a sum of two numbers has no order, while a
        sum over dp depends on where in the buffer a gradient lies, which differs between stages.
        """
        pending = [start_all_reduce(bucket, groups.dp) for bucket in self._buckets]
        for reduction in pending:
            reduction.wait(groups.dp.timeout_s)
        for param, view in self._views.items():
            if param.spec.is_tied:
                all_reduce(view, groups.embedding)

    def scale(self, factor: float) -> None:
        """Multiply every gradient by ``factor``."""
        self._flat.mul_(factor)


def _add_to(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def add_gradient(param: torch.Tensor) -> None:
        assert param.grad is not None, "the hook runs right after a gradient was accumulated"
        view.add_(param.grad)
        param.grad = None

    return add_gradient


def _bucket_sizes(views: Sequence[torch.Tensor], bucket_bytes: int) -> list[int]:
    """Elements of each bucket: whole views, until a bucket has ``bucket_bytes`` or more."""
    sizes = [0]
    for view in views:
        if sizes[-1] * view.element_size() >= bucket_bytes:
            sizes.append(0)
        sizes[-1] += view.numel()
    return sizes
