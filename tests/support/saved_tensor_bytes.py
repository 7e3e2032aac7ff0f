"""Counts what autograd keeps for backward, exactly: bytes of memory, each of it once.

For tests and benchmarks, which hold the numbers against plan.activations' formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """Context in which forwards are counted; ``tensors`` then lists what they keep.

    Two saved tensors in the same memory count once, with all of that memory. Every one of them is
    held as long as this object lives: memory that came free and was given out again would otherwise
    pass for memory that was seen. Layers under torch.utils.checkpoint, and layers fed by
    parallel.recompute, show what they really keep.

    Args:
        known: Tensors that live anyway and count nothing: parameters, tables, the micro-batch.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self._known = {_memory(tensor) for tensor in known}
        self._seen: dict[int, Tensor] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda saved: saved)

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
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, saved: Tensor) -> Tensor:
        memory = _memory(saved)
        if memory not in self._known:
            self._seen.setdefault(memory, saved)
        return saved


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
