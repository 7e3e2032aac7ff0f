"""Fills a rank's tensors from a checkpoint, whatever layout wrote it.

Every saved box that meets something the rank holds is read once, verified, and copied to where it
belongs; nothing else is read. It takes host memory for one box (planner.MAX_BOX_BYTES) twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from raymega.checkpoint.data_file import read_block
from raymega.checkpoint.dtypes import element_type
from raymega.checkpoint.items import Item, block_of, dtype_name
from raymega.checkpoint.manifest import Manifest
from raymega.checkpoint.tiling import uneven_cells
from raymega.errors import CheckpointError, ConfigError, Fault, raise_faults
from raymega.messages import Box, SavedBox
from raymega.storage.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """A block to fill: ``values`` is a view of the rank's tensor, [*box.shape]."""

    tensor: str
    global_shape: tuple[int, ...]
    box: Box
    values: torch.Tensor


def load(
    store: Store,
    manifest: Manifest,
    items: Sequence[Item],
    *,
    is_narrowing_allowed: bool = False,
) -> int:
    """Fill every item's tensor and return how many bytes were read.

    Values keep their bits unless the formats differ: they may widen, and narrow (float64 to
    float32) only with ``is_narrowing_allowed``.

    Raises:
        CheckpointError: With everything that the manifest lacks, before anything is read; or with
            the first file whose bytes are not what was written, and then the tensors are not to
            be used.
        ConfigError: Values would have to narrow; an older checkpoint would not help.
    """
    targets = list(_targets(items))
    saved = manifest.tensors()
    lacking = [fault for target in targets for fault in _missing(target, saved, manifest)]
    raise_faults(CheckpointError, lacking)
    if not is_narrowing_allowed:
        too_narrow = [fault for target in targets for fault in _narrowing(target, saved)]
        raise_faults(ConfigError, too_narrow)
    return _fill(store, manifest, targets)


def _targets(items: Iterable[Item]) -> Iterator[_Target]:
    for kind, parameter, tensor in items:
        for piece in parameter.spec.pieces:
            yield _Target(
                tensor=f"{kind}/{piece.tensor.name}",
                global_shape=piece.tensor.shape,
                box=piece.box,
                values=block_of(tensor, piece.local),
            )


def _fill(store: Store, manifest: Manifest, targets: Sequence[_Target]) -> int:
    by_tensor: dict[str, list[_Target]] = {}
    for target in targets:
        by_tensor.setdefault(target.tensor, []).append(target)
    num_bytes = 0
    for saved in sorted(manifest.boxes, key=lambda box: (box.file, box.start)):
        wanted = [at for at in by_tensor.get(saved.tensor, ()) if saved.box.intersect(at.box)]
        if wanted:
            block = _tensor_of(read_block(store, manifest, saved), saved)
            num_bytes += saved.num_bytes
        for target in wanted:
            _copy(block, saved.box, target)
    return num_bytes


def _tensor_of(data: bytes, saved: SavedBox) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, saved.dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(saved.box.shape)


def _copy(block: torch.Tensor, box: Box, target: _Target) -> None:
    common = box.intersect(target.box)
    assert common is not None, "only boxes that meet the target are read"
    target.values[common.within(target.box)] = block[common.within(box)]


def _missing(
    target: _Target, saved: Mapping[str, Sequence[SavedBox]], manifest: Manifest
) -> Iterator[Fault]:
    """What the manifest does not say about the target, or says differently."""
    boxes = saved.get(target.tensor, ())
    if not boxes:
        yield _fault(target, f"is not in {manifest.key}")
    elif boxes[0].global_shape != target.global_shape:
        shapes = f"{boxes[0].global_shape} in {manifest.key}, {target.global_shape} in this model"
        yield _fault(target, f"is {shapes}")
    else:
        for cell, count in uneven_cells(target.box, [box.box for box in boxes]):
            fact = f"has its block {cell.shape} at {cell.offset} {count} times in {manifest.key}"
            yield _fault(target, fact)


def _narrowing(target: _Target, saved: Mapping[str, Sequence[SavedBox]]) -> Iterator[Fault]:
    wanted = dtype_name(target.values.dtype)
    for dtype in {box.dtype for box in saved.get(target.tensor, ())}:
        if element_type(dtype).digits > element_type(wanted).digits:
            yield Fault(
                fact=f"{target.tensor} was saved in {dtype}, this run keeps it in {wanted}",
                rule="values are not narrowed in silence",
                remedy="set precision.dtype to what the checkpoint has",
            )


def _fault(target: _Target, fact: str) -> Fault:
    return Fault(
        fact=f"{target.tensor} {fact}",
        rule="a checkpoint must hold every element of the model once",
        remedy="use the model section that the checkpoint was made with, or another run.name",
    )
