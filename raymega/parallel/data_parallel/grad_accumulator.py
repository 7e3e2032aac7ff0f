"""GradientSum: the flat tensor of a bucket's gradients; GradSink: what receives them from backward.

A permanent sum adds up the micro-batches of a step. A temporary one, made for one backward, holds one
micro-batch's gradients until they are reduced. `grad_buffer.py` decides when a bucket is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch

from raymega.parallel.core.buckets import Bucket
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.core.weight_grads import add


class GradientSum:
    """Gradient sums in ``flat`` [bucket.size]; the first gradient after :meth:`forget` overwrites.

    Attributes:
        bucket: Bucket whose parameters are summed.
        flat: Sums; always the same memory.
        missing: Parameters whose gradient is still to come before the sums are complete.
    """

    def __init__(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.bucket, self.flat = bucket, flat
        self._views = {
            span.param: flat[span.start : span.stop].view(span.param.shape) for span in bucket.spans
        }
        self._padding = flat[bucket.spans[-1].stop :]
        self._untouched: set[ShardedParameter] = set()
        self.missing = {param for param in self._views if param.requires_grad}

    def views(self) -> Iterator[tuple[ShardedParameter, torch.Tensor]]:
        """Yield each parameter with the view of its sum, in the parameter's shape."""
        yield from self._views.items()

    def place(self, param: ShardedParameter) -> tuple[torch.Tensor, bool]:
        """Return the view to add a term to, and whether that term is the first and overwrites."""
        is_first = param in self._untouched
        self._untouched.discard(param)
        return self._views[param], is_first

    def add(self, param: ShardedParameter, gradient: torch.Tensor) -> None:
        """Add one term to the sum of ``param``."""
        total, is_first = self.place(param)
        add(gradient, total, is_first=is_first)

    def settle(self) -> None:
        """Zero the sums of parameters that got no gradient."""
        for param in self._untouched:
            self._views[param].zero_()
        self._untouched.clear()

    def forget(self) -> None:
        """Start a new sum, whatever ``flat`` holds; zero its padding."""
        # Only the padding is zeroed: the first gradients overwrite the rest, which saves a pass over memory.
        self._padding.zero_()
        self._untouched = set(self._views)
        self.missing = {param for param in self._views if param.requires_grad}


class GradSink:
    """Receiver of the gradients of a bucket's parameters, from layers and from autograd.

    Layers that can add to a sum in place, such as those with a matrix product, ask for the :meth:`place`
    and return no gradient. Gradients from autograd are in ``param.grad``. In both cases :meth:`collect` is
    called once a backward has passed all uses of a parameter.

    Args:
        sums: Function that returns the bucket's current GradientSum.
        complete: Function to call once a backward has added all its terms for a parameter.
    """

    def __init__(
        self, sums: Callable[[], GradientSum], complete: Callable[[ShardedParameter], None]
    ) -> None:
        self._sums, self._complete = sums, complete
        self._added: set[ShardedParameter] = set()

    def place(self, param: ShardedParameter) -> tuple[torch.Tensor, bool]:
        """Return the view to add a term to, and whether that term is the first and overwrites."""
        self._added.add(param)
        return self._sums().place(param)

    def collect(self, param: torch.Tensor) -> None:
        """Note that a backward's terms are complete: in place, in ``param.grad``, or deferred."""
        param = cast(ShardedParameter, param)
        # from autograd
        if param.grad is not None:
            self._sums().add(param, param.grad)
            param.grad = None
        # deferred: run_deferred of `core/weight_grads.py` calls again
        elif param not in self._added:
            return
        self._added.discard(param)
        self._complete(param)
