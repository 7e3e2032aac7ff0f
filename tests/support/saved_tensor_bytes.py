"""Counts what autograd keeps for backward, exactly: bytes of memory, each of it once.

For tests and benchmarks, which hold the numbers against plan.activations' formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from unittest.mock import patch

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from raymega.parallel.core import checkpointing


class SavedBytes:
    """Context in which forwards are counted; ``tensors`` then lists what they keep.

    Two saved tensors in the same memory count once, with all of that memory. Every one of them is
    held as long as this object lives: memory that came free and was given out again would otherwise
    pass for memory that was seen. Layers under torch.utils.checkpoint, and layers fed by
    core.checkpointing, show what they really keep: of the latter's hooks, which replace these while a
    layer runs, what passes them is counted.

    Args:
        known: Tensors that live anyway and count nothing: parameters, tables, the micro-batch.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self._known = {_memory(tensor) for tensor in known}
        self._seen: dict[int, Tensor] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda saved: saved)
        self._inner = patch.object(checkpointing, "saved_tensors_hooks", self._make_inner_hooks)

    @property
    def total(self) -> int:
        """Bytes kept so far."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._seen.values())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return one tensor per storage, in the order in which they were saved."""
        return tuple(self._seen.values())

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        self._inner.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.stop()
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, saved: Tensor) -> Tensor:
        memory = _memory(saved)
        if memory not in self._known:
            # views of one storage count once
            self._seen.setdefault(memory, saved)
        return saved

    def _make_inner_hooks(
        self, pack: Callable[[Tensor], object], unpack: Callable[[object], Tensor]
    ) -> saved_tensors_hooks:
        """Return the hooks of a layer whose input is recomputed, which count what they keep."""

        def count(saved: Tensor) -> object:
            packed = pack(saved)
            return self._pack(packed) if isinstance(packed, Tensor) else packed

        return saved_tensors_hooks(count, unpack)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
