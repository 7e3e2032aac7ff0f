"""Activation offloading: tensors saved for backward wait in host memory until backward needs them.

A unit is a block, or blocks that are recomputed together. Its saved tensors leave while the next unit
runs forward, and return while the next unit runs backward. So a device holds those of two units at most.
`parallel/core/host_copies.py` makes the copies, which are bit-exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from raymega.parallel.core.host_copies import AsyncCopy, HostMemory

Output = TypeVar("Output")
LEAST_BYTES = 1024
"""Smallest storage that is offloaded; below it a copy costs more than the memory is worth."""


@dataclass(kw_only=True, slots=True)
class _Piece:
    """Host copy of one storage, of which autograd saved one or more views."""

    host: Tensor
    leaving: AsyncCopy
    back: Tensor | None = None
    coming: AsyncCopy | None = None


@dataclass(frozen=True, slots=True)
class _Ticket:
    """Placeholder that autograd holds for a saved tensor; a view into a piece."""

    piece: _Piece
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(kw_only=True, slots=True)
class _Unit:
    """Saved storages of one unit in one forward, and the unit before it.

    Tensors stay ``held`` while the unit runs. Otherwise the allocator could reuse a freed address, and
    the new storage would be taken for the one already copied.
    """

    before: _Unit | None
    pieces: dict[tuple[int, int], _Piece] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)


class ActivationOffloader:
    """Offloader of a stage's saved activations.

    Args:
        memory: Host memory of the stage's device.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory, self._device = memory, memory.device
        self._last: _Unit | None = None

    def end(self) -> None:
        """Mark the end of a micro-batch's forward, so that its last unit has no successor."""
        self._last = None

    def run(self, unit: Callable[[], Output], staying: Iterable[Tensor]) -> Output:
        """Return ``unit()``; offload its saved tensors, except parameters and ``staying`` ones.

        An output of several tensors has some that the unit passes on unchanged, which are among ``staying``.
        """
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

        # forward: autograd saves tickets in place of tensors
        with saved_tensors_hooks(pack, self._unpack):
            output = unit()
        saved.held.clear()
        # backward of this unit begins with the gradient of its output: fetch then
        for made in tensors_in(output):
            if made.requires_grad and made.untyped_storage().data_ptr() not in here:
                made.register_hook(lambda _gradient: self._return(saved))
        return output

    def _leave(self, unit: _Unit, tensor: Tensor) -> _Ticket:
        """Start the copy of the tensor's storage, once for all its views, and return a ticket."""
        storage = tensor.untyped_storage()
        # The version tells apart contents before and after an in-place write.
        key = storage.data_ptr(), tensor._version
        if key not in unit.pieces:
            whole = _bytes_of(storage, tensor.device)
            host = self._memory.take(whole.numel())
            leaving = self._memory.start_out(whole, host)
            unit.pieces[key] = _Piece(host=host, leaving=leaving)
            unit.held.append(tensor)
        place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _Ticket(unit.pieces[key], tensor.dtype, *place)

    def _return(self, unit: _Unit) -> None:
        """Fetch the storages of this unit and, ahead of need, of the one before it.

        Afterwards autograd alone keeps this unit's storages alive.
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
            self._memory.give_back(piece.host, piece.coming)

    def _unpack(self, saved: Tensor | _Ticket) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        piece = saved.piece
        self._fetch(piece)
        assert piece.back is not None and piece.coming is not None, "it was fetched"
        piece.coming.wait()
        # Rebuild the view with its shape and strides, so that views of one storage share it again.
        values = torch.empty(0, dtype=saved.dtype, device=self._device)
        return values.set_(piece.back.untyped_storage(), saved.offset, saved.shape, saved.stride)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a value: itself, or those in a tuple's items or a dataclass's fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Return a storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
