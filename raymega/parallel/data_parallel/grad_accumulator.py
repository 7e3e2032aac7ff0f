"""A bucket's gradients as they come: a flat tensor in which each parameter has its place.

One that stays sums the micro-batches of a step; one that is made anew for each backward holds one
micro-batch's until it has left. What leaves when, and over which ranks, is grad_buffer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch

from raymega.parallel.core.buckets import Bucket
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.core.weight_grads import add


class GradientSum:
    """Sums in ``flat`` [bucket.size]; after :meth:`forget` a first gradient takes their place.

    Attributes:
        bucket: Whose.
        flat: The values; always the same memory.
        missing: Parameters that still get a gradient before the sums are complete.
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
        """Each parameter's sum, of its shape."""
        yield from self._views.items()

    def place(self, param: ShardedParameter) -> tuple[torch.Tensor, bool]:
        """Where the caller now adds one more term, and whether it is the first and overwrites."""
        is_first = param in self._untouched
        self._untouched.discard(param)
        return self._views[param], is_first

    def add(self, param: ShardedParameter, gradient: torch.Tensor) -> None:
        """One more term."""
        total, is_first = self.place(param)
        add(gradient, total, is_first=is_first)

    def settle(self) -> None:
        """Zero what got no gradient."""
        for param in self._untouched:
            self._views[param].zero_()
        self._untouched.clear()

    def forget(self) -> None:
        """Begin anew, whatever ``flat`` holds; its padding is zero."""
        self._padding.zero_()
        self._untouched = set(self._views)
        self.missing = {param for param in self._views if param.requires_grad}


class GradSink:
    """Takes the gradients of a bucket's parameters, however they come.

    Layers that can add to a sum where it lies, as a matrix product can, ask for the :meth:`place` and
    give autograd nothing. What comes through autograd is in ``param.grad``. Either way :meth:`take`
    is called when a backward has come by all uses of a parameter.

    Args:
        sums: Gives what sums now.
        complete: Called when a backward has added all that it has for a parameter.
    """

    def __init__(
        self, sums: Callable[[], GradientSum], complete: Callable[[ShardedParameter], None]
    ) -> None:
        self._sums, self._complete = sums, complete
        self._added: set[ShardedParameter] = set()

    def place(self, param: ShardedParameter) -> tuple[torch.Tensor, bool]:
        """Where the caller now adds a term, and whether it is the first and overwrites."""
        self._added.add(param)
        return self._sums().place(param)

    def collect(self, param: torch.Tensor) -> None:
        """All terms of a backward are there, in place or in ``param.grad``; or were put off."""
        param = cast(ShardedParameter, param)
        if param.grad is not None:
            self._sums().add(param, param.grad)
            param.grad = None
        elif param not in self._added:
            return
        self._added.discard(param)
        self._complete(param)
