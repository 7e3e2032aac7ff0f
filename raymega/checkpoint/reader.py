"""Fills a rank's tensors from a checkpoint, whatever layout wrote it.

Every saved box that meets something the rank holds is read once, verified, and copied to where it
belongs; nothing else is read. It takes host memory for one box (planner.MAX_BOX_BYTES) twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from raymega.checkpoint.data_file import read_block
from raymega.checkpoint.dtypes import element_type
from raymega.checkpoint.items import dtype_name
from raymega.checkpoint.manifest import Manifest
from raymega.checkpoint.tiling import uneven_cells
from raymega.errors import CheckpointError, ConfigError, Fault, raise_faults
from raymega.messages import Box, SavedBox
from raymega.parallel.blocks import Block
from raymega.storage.store import Store


def load(
    store: Store,
    manifest: Manifest,
    blocks: Sequence[Block],
    *,
    is_narrowing_allowed: bool = False,
) -> int:
    """Fill every block and return how many bytes were read.

    Values keep their bits unless the formats differ: they may widen, and narrow (float64 to
    float32) only with ``is_narrowing_allowed``.

    Raises:
        CheckpointError: With everything that the manifest lacks, before anything is read; or with
            the first file whose bytes are not what was written, and then the tensors are not to
            be used.
        ConfigError: Values would have to narrow; an older checkpoint would not help.
    """
    saved = manifest.tensors()
    lacking = [fault for block in blocks for fault in _missing(block, saved, manifest)]
    raise_faults(CheckpointError, lacking)
    if not is_narrowing_allowed:
        too_narrow = [fault for block in blocks for fault in _narrowing(block, saved)]
        raise_faults(ConfigError, too_narrow)
    return _fill(store, manifest, blocks)


def _fill(store: Store, manifest: Manifest, blocks: Sequence[Block]) -> int:
    by_tensor: dict[str, list[Block]] = {}
    for block in blocks:
        by_tensor.setdefault(block.name, []).append(block)
    num_bytes = 0
    for saved in sorted(manifest.boxes, key=lambda box: (box.file, box.start)):
        wanted = [at for at in by_tensor.get(saved.tensor, ()) if saved.box.intersect(at.box)]
        if wanted:
            values = _tensor_of(read_block(store, manifest, saved), saved)
            num_bytes += saved.num_bytes
        for target in wanted:
            _copy(values, saved.box, target)
    return num_bytes


def _tensor_of(data: bytes, saved: SavedBox) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, saved.dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(saved.box.shape)


def _copy(values: torch.Tensor, box: Box, target: Block) -> None:
    common = box.intersect(target.box)
    assert common is not None, "only boxes that meet the target are read"
    target.values.detach()[common.within(target.box)] = values[common.within(box)]


def _missing(
    target: Block, saved: Mapping[str, Sequence[SavedBox]], manifest: Manifest
) -> Iterator[Fault]:
    """What the manifest does not say about the target, or says differently."""
    boxes = saved.get(target.name, ())
    if not boxes:
        yield _fault(target, f"is not in {manifest.key}")
    elif boxes[0].global_shape != target.tensor.shape:
        shapes = f"{boxes[0].global_shape} in {manifest.key}, {target.tensor.shape} in this model"
        yield _fault(target, f"is {shapes}")
    else:
        for cell, count in uneven_cells(target.box, [box.box for box in boxes]):
            fact = f"has its block {cell.shape} at {cell.offset} {count} times in {manifest.key}"
            yield _fault(target, fact)


def _narrowing(target: Block, saved: Mapping[str, Sequence[SavedBox]]) -> Iterator[Fault]:
    wanted = dtype_name(target.values.dtype)
    for dtype in {box.dtype for box in saved.get(target.name, ())}:
        if element_type(dtype).digits > element_type(wanted).digits:
            yield Fault(
                fact=f"{target.name} was saved in {dtype}, this run keeps it in {wanted}",
                rule="values are not narrowed in silence",
                remedy="set precision.dtype to what the checkpoint has",
            )


def _fault(target: Block, fact: str) -> Fault:
    return Fault(
        fact=f"{target.name} {fact}",
        rule="a checkpoint must hold every element of the model once",
        remedy="use the model section that the checkpoint was made with, or another run.name",
    )
