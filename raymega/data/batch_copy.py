"""Brings all micro-batches of a step to the device in one copy, for which the host does not wait.

A thread packs them into pinned memory ahead, see `raymega.data.prefetch`. For a CPU nothing is packed
or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raymega.parallel.context_parallel.context import (
    EncoderInput,
    MicroBatch,
    PairBatch,
    ScoreBatch,
    TeacherBatch,
)
from raymega.parallel.context_parallel.images import Images
from raymega.parallel.context_parallel.stream_places import Places
from raymega.parallel.core.pinned_memory import recycled

ALIGNMENT_BYTES = 256
"""Tensors begin at multiples of this in the buffer, so that kernels may read them in wide words."""
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatches:
    """Micro-batches of a step in host memory.

    Attributes:
        micro_batches: Micro-batches; all their tensors are views of ``buffer`` where there is one.
        buffer: Pinned memory, [bytes] uint8; None where the device is a CPU.
    """

    micro_batches: Sequence[MicroBatch]
    buffer: Tensor | None

    def on_device(self, device: torch.device | str) -> list[MicroBatch]:
        """Return the micro-batches on ``device``, for kernels of the current stream.

        With the copy, torch's allocator of pinned memory notes an event. It gives the buffer's memory
        away only after that event, so no write of a later step overtakes the copy.
        """
        if self.buffer is None:
            return list(self.micro_batches)
        there = self.buffer.to(device, non_blocking=True)

        def same_place(host: Tensor) -> Tensor:
            return _view(there, int(host.storage_offset()) * host.element_size(), host)

        return [_change_tensors(batch, same_place) for batch in self.micro_batches]


def pack_batches(
    micro_batches: Sequence[MicroBatch],
    device: torch.device | str,
    *,
    make_buffer: Callable[[int], Tensor] = recycled,
) -> PackedBatches:
    """Return ``micro_batches``, packed into one buffer where ``device`` is a GPU."""
    if torch.device(device).type != "cuda":
        return PackedBatches(micro_batches=micro_batches, buffer=None)
    # place all tensors; what a micro-batch holds under two names is packed once
    begins: dict[int, int] = {}
    end = 0
    for tensor in (tensor for batch in micro_batches for tensor in _tensors(batch)):
        if id(tensor) not in begins:
            begins[id(tensor)] = end
            end += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    # fill the buffer
    buffer = make_buffer(end)

    def packed(tensor: Tensor) -> Tensor:
        return _view(buffer, begins[id(tensor)], tensor).copy_(tensor)

    return PackedBatches(
        micro_batches=[_change_tensors(batch, packed) for batch in micro_batches], buffer=buffer
    )


def _view(buffer: Tensor, begin: int, like: Tensor) -> Tensor:
    """Return the bytes of ``buffer`` from ``begin`` on as a tensor of ``like``'s dtype and shape."""
    return buffer[begin : begin + like.nbytes].view(like.dtype).view(like.shape)


def _tensors(batch: MicroBatch) -> Iterator[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _change_tensors(batch, note)
    yield from found


def _change_tensors(batch: MicroBatch, change: Change) -> MicroBatch:
    """Return the micro-batch with ``change`` of each of its tensors."""
    rows = batch.rows
    return replace(
        batch,
        tokens=change(batch.tokens),
        labels=change(batch.labels),
        mask=change(batch.mask),
        samples=change(batch.samples),
        later=_both(batch.later, change),
        encoder=None if batch.encoder is None else EncoderInput(*map(change, batch.encoder)),
        pairs=batch.pairs and _change_pairs(batch.pairs, change),
        teacher=batch.teacher and _change_teacher(batch.teacher, change),
        rows=rows._replace(
            positions=change(rows.positions),
            row_positions=None if rows.row_positions is None else change(rows.row_positions),
            ends=None if rows.ends is None else change(rows.ends),
            order=_both(rows.order, change),
            streams=None if rows.streams is None else _both_places(rows.streams, change),
            axes=None if rows.axes is None else change(rows.axes),
            images=None if rows.images is None else _change_images(rows.images, change),
        ),
    )


def _change_images(images: Images, change: Change) -> Images:
    return images._replace(
        pixels=change(images.pixels), grids=change(images.grids), places=change(images.places)
    )


def _change_pairs(pairs: PairBatch | ScoreBatch, change: Change) -> PairBatch | ScoreBatch:
    if isinstance(pairs, ScoreBatch):
        return replace(
            pairs,
            places=change(pairs.places),
            documents=change(pairs.documents),
            weights=change(pairs.weights),
            labels=change(pairs.labels),
            is_counted=change(pairs.is_counted),
        )
    return replace(
        pairs,
        answers=change(pairs.answers),
        counts=change(pairs.counts),
        is_counted=change(pairs.is_counted),
        reference=None if pairs.reference is None else change(pairs.reference),
        is_desirable=None if pairs.is_desirable is None else change(pairs.is_desirable),
    )


def _change_teacher(teacher: TeacherBatch, change: Change) -> TeacherBatch:
    """Return stored logits of a teacher, changed; a live one says what it says on the device."""
    assert teacher.ids is not None, "a loader has stored logits alone"
    assert teacher.logits is not None, "tokens and their logits are stored together"
    return replace(teacher, ids=change(teacher.ids), logits=change(teacher.logits))


def _both_places(streams: tuple[Places, Places], change: Change) -> tuple[Places, Places]:
    encoder, decoder = (Places(*map(change, each)) for each in streams)
    return encoder, decoder


def _both(pair: tuple[Tensor, Tensor] | None, change: Change) -> tuple[Tensor, Tensor] | None:
    return None if pair is None else (change(pair[0]), change(pair[1]))
