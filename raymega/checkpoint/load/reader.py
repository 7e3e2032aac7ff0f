"""Fills a rank's tensors from a checkpoint, whatever layout wrote it.

Every saved box that overlaps a block of the rank is read once, whole, and verified, and its elements
are copied to their places. Before anything is read, the module checks that the checkpoint holds what
the model needs. ``load/ranged_reads.py`` makes the requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import torch

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.coverage import uncovered_cells
from raymega.checkpoint.format.dtypes import element_type
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.load.ranged_reads import NUM_FETCHES, fetch
from raymega.config.schema import Job
from raymega.errors import CheckpointError, ConfigError, Fault, raise_faults
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.memory.optimizer_state import saved_kinds
from raymega.plan.tensor_table import saved_tensors
from raymega.storage.store import Store

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type for each element size in bytes, to copy bits unchanged; numpy lacks bfloat16."""


def load(  # noqa: PLR0913  # what may be left out says how strict it is, and who watches
    store: Store,
    manifest: Manifest,
    blocks: Sequence[TensorBlock],
    *,
    is_narrowing_allowed: bool = False,
    expected: Collection[str] = (),
    num_fetches: int = NUM_FETCHES,
    progress: Callable[[], None] = lambda: None,
) -> int:
    """Fill every block and return how many bytes were fetched.

    Values keep their bits unless the formats differ: they may widen, and narrow (float64 to
    float32) only with ``is_narrowing_allowed``.

    Args:
        store: Store of the run.
        manifest: Manifest of the checkpoint.
        blocks: Blocks of this rank, to be filled.
        is_narrowing_allowed: Whether values may lose digits.
        expected: Saved names of the tensors of all ranks together. When given, a checkpoint with
            other tensors is refused; else only missing tensors are refused.
        num_fetches: Number of requests at once.
        progress: Function called after each box or part of a box, for a hang detector.

    Raises:
        CheckpointError: Elements are missing from the manifest (all are named, before anything is
            read); or a file's bytes differ from those written, and the tensors must not be used.
        ConfigError: The checkpoint holds more than the model, or values would have to narrow. An
            older checkpoint would not help.
    """
    # Refuse before anything is read. Missing tensors together with unexpected ones are one error,
    # as both follow from another model.
    saved = manifest.tensors()
    unexpected = list(_unexpected(expected, manifest)) if expected else []
    lacking = [fault for block in blocks for fault in _missing(block, saved, manifest)]
    raise_faults(CheckpointError, [*lacking, *unexpected] if lacking else [])
    raise_faults(ConfigError, unexpected)
    if not is_narrowing_allowed:
        too_narrow = [fault for block in blocks for fault in _narrowing(block, saved)]
        raise_faults(ConfigError, too_narrow)
    # Only the boxes that overlap a block of this rank.
    by_tensor: dict[str, list[TensorBlock]] = {}
    for block in blocks:
        by_tensor.setdefault(block.name, []).append(block)
    wanted = [
        saved
        for saved in manifest.boxes
        if any(saved.box.intersect(block.box) for block in by_tensor.get(saved.tensor, ()))
    ]

    def place_of(saved: SavedBox) -> memoryview | None:
        return _place_of(saved, by_tensor[saved.tensor])

    def use(saved: SavedBox, part: Box, data: memoryview | None) -> None:
        if data is not None:
            for target in by_tensor[saved.tensor]:
                _copy(data, saved.dtype, part, target)
        progress()

    return fetch(store, manifest, wanted, use, num_fetches=num_fetches, place_of=place_of)


def boxes_by_name(blocks: Sequence[TensorBlock]) -> dict[str, list[Box]]:
    """Return the boxes of the blocks, by saved name."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for block in blocks:
        boxes[block.name].append(block.box)
    return boxes


def names_of(job: Job) -> set[str]:
    """Return the saved name of every tensor that the ranks of a run hold together."""
    return {
        f"{kind}/{tensor.name}"
        for tensor in saved_tensors(job.model)
        for kind in ("model", *_state_kinds(job, tensor))
    }


def _state_kinds(job: Job, tensor: GlobalTensor) -> tuple[str, ...]:
    return saved_kinds(job.optimizer, tensor.role) if tensor.is_trained else ()


def _place_of(saved: SavedBox, targets: Sequence[TensorBlock]) -> memoryview | None:
    """Return the host memory that the box can be read into unchanged; None when it must be copied."""
    # One block only, which contains the whole box, contiguously and in the same format.
    meeting = [target for target in targets if saved.box.intersect(target.box)]
    if len(meeting) > 1 or saved.box.intersect(meeting[0].box) != saved.box:
        return None
    place = meeting[0].at(saved.box)
    is_as_saved = meeting[0].dtype == saved.dtype and place.is_contiguous()
    if place.device.type != "cpu" or not is_as_saved:
        return None
    return place.view(-1).view(torch.uint8).numpy().data


def _copy(data: memoryview, dtype: str, box: Box, target: TensorBlock) -> None:
    """Copy the elements of ``box``, whose bytes are ``data``, to their places in the target."""
    common = box.intersect(target.box)
    if common is None:
        return
    place = target.values.detach()[common.within(target.box)]
    part = common.within(box)
    # On the host and in one format: bits as integers. Otherwise torch converts and transfers.
    if place.device.type == "cpu" and target.dtype == dtype:
        as_integers = place.view(_SAME_SIZE[place.itemsize]).numpy()
        as_integers[...] = np.frombuffer(data, as_integers.dtype).reshape(box.shape)[part]
    else:
        kind: torch.dtype = getattr(torch, dtype)
        # torch.frombuffer warns about read-only memory, hence the copy.
        values = torch.frombuffer(bytearray(data), dtype=kind).view(box.shape)
        place.copy_(values[part])


def _missing(
    target: TensorBlock, saved: Mapping[str, Sequence[SavedBox]], manifest: Manifest
) -> Iterator[Fault]:
    """Yield the faults of a target whose elements the manifest lacks or lists with another shape."""
    boxes = saved.get(target.name, ())
    if not boxes:
        yield _fault(target, f"is not in {manifest.key}")
    elif boxes[0].global_shape != target.tensor.shape:
        shapes = f"{boxes[0].global_shape} in {manifest.key}, {target.tensor.shape} in this model"
        yield _fault(target, f"is {shapes}")
    else:
        for cell, count in uncovered_cells(target.box, [box.box for box in boxes]):
            fact = f"has its block {cell.shape} at {cell.offset} {count} times in {manifest.key}"
            yield _fault(target, fact)


def _unexpected(expected: Collection[str], manifest: Manifest) -> Iterator[Fault]:
    """Yield a fault for each saved tensor that no rank holds."""
    # Without it the resumed run would be another one.
    for name in sorted(manifest.shapes.keys() - set(expected)):
        yield Fault(
            fact=f"{name} is in {manifest.key}, and nothing in this model",
            rule="a run resumes with every tensor that was saved",
            remedy="use the model and optimizer that the checkpoint was made with, or start "
            "another run from its weights by checkpoint.init_from",
        )


def _narrowing(target: TensorBlock, saved: Mapping[str, Sequence[SavedBox]]) -> Iterator[Fault]:
    wanted = target.dtype
    for dtype in {box.dtype for box in saved.get(target.name, ())}:
        if element_type(dtype).digits > element_type(wanted).digits:
            yield Fault(
                fact=f"{target.name} was saved in {dtype}, this run keeps it in {wanted}",
                rule="values are not narrowed in silence",
                remedy="set precision.dtype to what the checkpoint has",
            )


def _fault(target: TensorBlock, fact: str) -> Fault:
    return Fault(
        fact=f"{target.name} {fact}",
        rule="a checkpoint must hold every element of the model once",
        remedy="use the model section that the checkpoint was made with, or another run.name",
    )
