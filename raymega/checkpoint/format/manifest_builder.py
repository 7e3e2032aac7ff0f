"""Build a manifest from the ranks' reports, and refuse it unless every element was saved once.

It reads and writes no store: the ranks have written the data, and ``manifest.commit`` writes the
manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.box_table import BoxTable
from raymega.checkpoint.format.coverage import is_partition, uncovered_cells
from raymega.checkpoint.format.manifest import Manifest
from raymega.errors import CheckpointError, Fault, raise_faults
from raymega.messages import ShardSaved


def assemble(  # noqa: PLR0913  # each is a part of the manifest
    shards: Sequence[ShardSaved],
    *,
    world_size: int,
    attempt: int,
    created: str,
    job: Mapping[str, object],
    grid: Mapping[str, object],
    metrics: Mapping[str, float] = MappingProxyType({}),
) -> Manifest:
    """Return the manifest of a save that every rank has reported.

    Raises:
        CheckpointError: A rank is missing, failed, or is at another step than the others; or an
            element is not saved exactly once.
    """
    # All ranks succeeded at one step; only then shards[0] speaks for all of them.
    raise_faults(CheckpointError, list(_shard_faults(shards, world_size)))
    manifest = Manifest(
        step=shards[0].step,
        attempt=attempt,
        created=created,
        state=shards[0].state,
        job=dict(job),
        grid=dict(grid),
        metrics=dict(metrics),
        headers=dict(sorted(each for shard in shards for each in shard.headers.items())),
        boxes=BoxTable.joined(
            shard.boxes for shard in sorted(shards, key=lambda shard: shard.rank)
        ),
    )
    # Every element of every tensor is listed exactly once.
    raise_faults(CheckpointError, coverage_faults(manifest))
    return manifest


def coverage_faults(manifest: Manifest) -> list[Fault]:
    """Return the faults of tensors whose elements the manifest does not list exactly once each.

    Boxes of one tensor that disagree on its dtype or global shape are faults too.
    """
    boxes = BoxTable.of(manifest.boxes)
    suspects = set(_unlike_tensors(boxes))
    # weights and their moments are cut alike: each way to cut a shape is looked at once
    known: dict[tuple[tuple[int, ...], bytes], bool] = {}
    for tensor, rows in boxes.by_tensor():
        dims = len(tensor.shape)
        cut = np.hstack([rows["offset"][:, :dims], rows["shape"][:, :dims]]).astype(np.int64)
        key = (tensor.shape, cut.tobytes())
        if key not in known:
            known[key] = _is_whole(tensor.shape, cut[:, :dims], cut[:, dims:])
        if not known[key]:
            suspects.add(tensor.name)
    if not suspects:
        return []
    # only now one object a box, to name what is missing or double
    of_suspects = [each.tensor in suspects for each in boxes]
    named = replace(manifest, boxes=boxes.chosen(boxes.rows[of_suspects]))
    return [
        fault
        for name, listed in named.tensors().items()
        for fault in tensor_faults(manifest, name, listed)
    ]


def _unlike_tensors(boxes: BoxTable) -> Iterator[str]:
    """Yield the names under which the table has tensors of several dtypes or shapes."""
    used = np.unique(boxes.rows["tensor"])
    counts = Counter(boxes.tensors[number].name for number in used)
    yield from (name for name, count in counts.items() if count > 1)


def _is_whole(shape: tuple[int, ...], offsets: np.ndarray, extents: np.ndarray) -> bool:
    is_inside = (offsets >= 0).all() and (extents > 0).all() and (offsets + extents <= shape).all()
    return bool(is_inside) and is_partition(shape, offsets, extents)


def tensor_faults(manifest: Manifest, name: str, boxes: Sequence[SavedBox]) -> list[Fault]:
    """Return the faults of one tensor, as :func:`coverage_faults`, given all its ``boxes``."""
    shape = boxes[0].global_shape
    whole = Box.whole(shape)
    if len({(box.dtype, box.global_shape) for box in boxes}) > 1:
        return [_tensor_fault(manifest, name, "has boxes of several shapes or dtypes")]
    if any(whole.intersect(box.box) != box.box for box in boxes):
        return [_tensor_fault(manifest, name, f"has a box outside its shape {shape}")]
    return [
        _tensor_fault(manifest, name, f"has its block {cell.shape} at {cell.offset} {count} times")
        for cell, count in uncovered_cells(whole, [box.box for box in boxes])
    ]


def _shard_faults(shards: Sequence[ShardSaved], world_size: int) -> Iterator[Fault]:
    def fault(fact: str) -> Fault:
        return Fault(
            fact=f"save of step {shards[0].step if shards else '?'}: {fact}",
            rule=f"each of {world_size} ranks must write its part of one and the same step",
            remedy="the previous checkpoint is kept; the next save is tried as planned",
        )

    ranks = [shard.rank for shard in shards]
    missing = sorted(set(range(world_size)) - set(ranks))
    if missing or len(ranks) != world_size:
        yield fault(f"{len(ranks)} reports, none from ranks {missing}")
    for shard in shards:
        if shard.error:
            yield fault(f"rank {shard.rank} failed: {shard.error}")
        elif (shard.step, shard.state) != (shards[0].step, shards[0].state):
            yield fault(f"rank {shard.rank} is at {shard.state}, rank {ranks[0]} is not")


def _tensor_fault(manifest: Manifest, name: str, fact: str) -> Fault:
    return Fault(
        fact=f"{name} {fact} in {manifest.key}",
        rule="every element of a tensor must be saved exactly once",
        remedy="report this: the ranks' shares do not add up",
    )
