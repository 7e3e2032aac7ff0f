"""Activations that wait in host memory between a micro-batch's forward and its backward.

What a unit (a block, or blocks that run again together) saves for backward leaves for the host while the
next unit works, and comes back while the one after it is in backward: so a device holds those of two units
at most. Bits are those that were saved. The copies themselves are parallel.host_memory's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from raymega.parallel.core.host_copies import AsyncCopy, HostMemory

LEAST_BYTES = 1024
"""Less than that stays where it is."""


@dataclass(kw_only=True, slots=True)
class _Piece:
    """One memory, of which autograd saved some views."""

    host: Tensor
    leaving: AsyncCopy
    back: Tensor | None = None
    coming: AsyncCopy | None = None


@dataclass(frozen=True, slots=True)
class _Ticket:
    """Stands for a saved tensor that lies in a piece."""

    piece: _Piece
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(kw_only=True, slots=True)
class _Unit:
    """What one unit saved in one forward, and the unit before it.

    Memory stays ``held`` while the unit runs: what came free and was given out again would otherwise
    pass for memory that was seen.
    """

    before: _Unit | None
    pieces: dict[tuple[int, int], _Piece] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)


class ActivationOffloader:
    """The activations of a stage that are on the host.

    Args:
        device: Where the stage computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory, self._device = HostMemory(device), device
        self._last: _Unit | None = None

    def end(self) -> None:
        """A micro-batch's forward through the stage is over: no unit follows the last one."""
        self._last = None

    def run(self, unit: Callable[[], Tensor], staying: Iterable[Tensor]) -> Tensor:
        """``unit()``, whose saved tensors leave, but for parameters and memory of ``staying``."""
        here = {tensor.untyped_storage().data_ptr() for tensor in staying}
        saved = self._last = _Unit(before=self._last)

        def pack(tensor: Tensor) -> Tensor | _Ticket:
            storage = tensor.untyped_storage()
            if (
                isinstance(tensor, nn.Parameter)
                or storage.nbytes() < LEAST_BYTES
                or storage.data_ptr() in here
            ):
                return tensor
            return self._leave(saved, tensor)

        with saved_tensors_hooks(pack, self._unpack):
            output = unit()
        saved.held.clear()
        output.register_hook(lambda _gradient: self._return(saved))
        return output

    def _leave(self, unit: _Unit, tensor: Tensor) -> _Ticket:
        """Begin to copy its memory, once for all views of it."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor._version
        if key not in unit.pieces:
            whole = _bytes_of(storage, tensor.device)
            host = self._memory.empty_like(whole)
            leaving = self._memory.start_out(whole, host)
            unit.pieces[key] = _Piece(host=host, leaving=leaving)
            unit.held.append(tensor)
        place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _Ticket(unit.pieces[key], tensor.dtype, *place)

    def _return(self, unit: _Unit) -> None:
        """The unit's backward begins: what it saved must be here, and what the one before saved comes.

        From now on only autograd holds the unit's memory, as long as it needs it.
        """
        for each in (unit, unit.before):
            for piece in each.pieces.values() if each is not None else ():
                self._fetch(piece)
        unit.pieces.clear()
        unit.before = None

    def _fetch(self, piece: _Piece) -> None:
        if piece.back is None:
            piece.leaving.wait()
            piece.back = torch.empty(piece.host.shape, dtype=torch.uint8, device=self._device)
            piece.coming = self._memory.start_in(piece.host, piece.back)

    def _unpack(self, saved: Tensor | _Ticket) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        piece = saved.piece
        self._fetch(piece)
        assert piece.back is not None and piece.coming is not None, "it was fetched"
        piece.coming.wait()
        values = torch.empty(0, dtype=saved.dtype, device=self._device)
        return values.set_(piece.back.untyped_storage(), saved.offset, saved.shape, saved.stride)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Those of a dataclass, and of what is inside it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """All of a memory, flat."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
