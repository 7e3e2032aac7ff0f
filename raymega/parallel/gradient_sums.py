"""A bucket's gradients as they come: a flat tensor in which each parameter has its place.

One that stays sums the micro-batches of a step; one that is made anew for each backward holds one
micro-batch's until it has left. What leaves when, and over which ranks, is grad_buffer's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from raymega.parallel.buckets import Bucket
from raymega.parallel.parameter import ShardedParameter


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
        self._untouched: set[ShardedParameter] = set()
        self.missing = {param for param in self._views if param.requires_grad}

    def views(self) -> Iterator[tuple[ShardedParameter, torch.Tensor]]:
        """Each parameter's sum, of its shape."""
        yield from self._views.items()

    def add(self, param: ShardedParameter, gradient: torch.Tensor) -> None:
        """One more term."""
        if param in self._untouched:
            self._untouched.remove(param)
            self._views[param].copy_(gradient)
        else:
            self._views[param].add_(gradient)

    def settle(self) -> None:
        """Zero what got no gradient."""
        for param in self._untouched:
            self._views[param].zero_()
        self._untouched.clear()

    def forget(self) -> None:
        """Begin anew, whatever ``flat`` holds; its padding is zero."""
        self.flat[self.bucket.spans[-1].stop :] = 0.0
        self._untouched = set(self._views)
        self.missing = {param for param in self._views if param.requires_grad}
