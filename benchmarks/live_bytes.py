"""LiveBytes measures the peak bytes of tensors that were created while it is active. CPU only."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts each new storage of this thread's operators, backward included, once.

    A storage counts from its creation until it is released.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count what is new in its results."""
        before = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self._count(result.untyped_storage(), before)
        return results

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = storage._cdata
        if storage.data_ptr() in before or key in self._sizes or storage.nbytes() == 0:
            return
        self._sizes[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)
