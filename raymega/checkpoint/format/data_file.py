"""A rank's data files: which boxes the rank writes, their places in a file, and reading and verifying one.

Values that several replicas hold are divided among them; values that one rank holds alone it writes
itself. The division is a pure function, and no messages are exchanged: all replicas of a set of blocks
have them in the same order, so they compute the same division, and each takes its own part.

The format is safetensors, so that other tools can open the parts of a checkpoint: 8 bytes of header
length, a JSON header, then the blocks' bytes end to end, little-endian. Reading uses only the byte
ranges and checksums of the manifest, never the JSON header, which has a checksum there too.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import add

from isal.isal_zlib import crc32

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.dtypes import element_type
from raymega.checkpoint.format.manifest import Manifest
from raymega.errors import CheckpointError
from raymega.plan.flat_boxes import boxes_of_range
from raymega.storage.store import Store

MAX_BOX_BYTES = 64 * 2**20
"""Largest box in bytes. A box is read and verified whole, so this bounds what a reader fetches in excess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """Block of a global tensor.

    Attributes:
        tensor: Saved name, ``kind/name``.
        dtype: Element type, numpy's name.
        global_shape: Shape of the whole tensor.
        box: Place of the block in the tensor.
    """

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box

    @property
    def num_bytes(self) -> int:
        """Size of the block in bytes."""
        return self.box.num_elements * element_type(self.dtype).num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalBlock(TensorPart):
    """Block that a rank holds.

    Attributes:
        is_primary: Whether this rank saves the block, of all tp ranks and stages that hold it.
        holders: Global ranks that hold the block and are primary: dp * cp ranks for a dense weight,
            edp ranks for an expert, one rank for a sharded tensor.
        replica: Index of this rank in ``holders``.
    """

    is_primary: bool = True
    holders: tuple[int, ...] = (0,)
    replica: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteAssignment(TensorPart):
    """Part of a local block that this rank writes.

    Attributes:
        local_block: Index of the block.
        start: First byte in the data file, counted from the header's end; 0 before :func:`layout_file`.
    """

    local_block: int
    start: int = 0


def share_boxes(
    local_blocks: Sequence[LocalBlock], *, max_box_bytes: int = MAX_BOX_BYTES
) -> tuple[WriteAssignment, ...]:
    """Return the boxes that this rank writes: its share of the blocks that it is primary for.

    Blocks with the same holders are laid end to end and divided into one range of equal bytes per
    holder. A row (all indices but the last dim's) belongs to the range in which it begins. So no share is
    more than one row too large, and fewer blocks are cut than there are holders. A box has at most
    ``max_box_bytes``, itself at most MAX_BOX_BYTES, or is a single row that is longer.
    """
    # Blocks by holders: each set of holders divides its blocks by itself.
    together: dict[tuple[tuple[int, ...], int], list[WriteAssignment]] = defaultdict(list)
    for index, local_block in enumerate(local_blocks):
        if local_block.is_primary:
            together[local_block.holders, local_block.replica].append(_whole(index, local_block))
    max_box_bytes = min(max_box_bytes, MAX_BOX_BYTES)
    assignments: list[WriteAssignment] = []
    # [begin, end) is this rank's range in bytes, relative to the block at hand.
    for (holders, replica), wholes in sorted(together.items(), key=lambda at: -len(at[0][0])):
        total = sum(assignment.num_bytes for assignment in wholes)
        begin, end = (total * place // len(holders) for place in (replica, replica + 1))
        for assignment in wholes:
            assignments += _rows_between(assignment, begin, end, max_box_bytes)
            begin, end = begin - assignment.num_bytes, end - assignment.num_bytes
    return tuple(assignments)


def pack(sizes: Sequence[int], limit: int) -> tuple[slice, ...]:
    """Return slices of ``sizes`` that each sum to at most ``limit``, or are one larger item.

    It packs boxes into files, and files into portions that are copied at once.
    """
    stretches: list[slice] = []
    begin = total = 0
    for index, size in enumerate(sizes):
        if index > begin and total + size > limit:
            stretches.append(slice(begin, index))
            begin, total = index, 0
        total += size
    return (*stretches, slice(begin, len(sizes))) if sizes else ()


def _whole(index: int, local_block: LocalBlock) -> WriteAssignment:
    return WriteAssignment(
        local_block=index,
        tensor=local_block.tensor,
        dtype=local_block.dtype,
        global_shape=local_block.global_shape,
        box=local_block.box,
    )


def _rows_between(
    assignment: WriteAssignment, begin: int, end: int, max_bytes: int
) -> Iterator[WriteAssignment]:
    """Yield the rows that begin in bytes [begin, end) of ``assignment``, in boxes of bounded size.

    In an expert tensor a row is one feature of one expert: a whole expert may exceed a box.
    """
    outer, inner = _rows_of(assignment.box.shape)
    num_rows = prod(outer)
    row_bytes = assignment.num_bytes // num_rows
    # Byte offsets rounded up to rows, and clamped: the range may lie partly or wholly outside.
    first, last = (min(max(-(-byte // row_bytes), 0), num_rows) for byte in (begin, end))
    step = max(1, max_bytes // row_bytes)
    # Where several experts fit into a box, it holds whole ones.
    if step > outer[-1]:
        step -= step % outer[-1]
    # A range of rows as boxes over the outer dims, extended by the inner dim and moved to its place.
    for row in range(first, last, step):
        for box in boxes_of_range(outer, row, min(row + step, last)):
            offset, shape = (*box.offset, *(0 for _ in inner)), (*box.shape, *inner)
            place = tuple(map(add, assignment.box.offset, offset))
            yield replace(assignment, box=Box(offset=place, shape=shape))


def _rows_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split a shape into the dims that count rows and those of one row; a vector's elements are rows."""
    return (shape[:-1], shape[-1:]) if len(shape) > 1 else (shape, ())


def layout_file(assignments: Iterable[WriteAssignment]) -> tuple[WriteAssignment, ...]:
    """Return blocks in the order of a data file: end to end, each aligned to a multiple of its element's bytes."""
    # Widest element type first: element sizes are powers of two, so no padding is needed.
    ordered = sorted(assignments, key=lambda assignment: -element_type(assignment.dtype).num_bytes)
    starts = accumulate((assignment.num_bytes for assignment in ordered), initial=0)
    return tuple(replace(each, start=start) for each, start in zip(ordered, starts, strict=False))


def file_header(layout: Iterable[WriteAssignment], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file of such blocks, with ``metadata`` under ``__metadata__`` for other readers."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for each in layout:
        entries[_entry_name(each)] = {
            "dtype": element_type(each.dtype).safetensors_code,
            "shape": each.box.shape,
            "data_offsets": (each.start, each.start + each.num_bytes),
        }
    return safetensors_header(entries)


def saved_boxes(
    layout: Iterable[WriteAssignment], checksums: Iterable[int], *, file: str, header_bytes: int
) -> tuple[SavedBox, ...]:
    """Return the manifest's entries for the blocks of ``layout``, whose crc32 are ``checksums``."""
    return tuple(
        SavedBox(
            tensor=assignment.tensor, dtype=assignment.dtype, global_shape=assignment.global_shape, box=assignment.box,
            file=file, start=header_bytes + assignment.start, num_bytes=assignment.num_bytes,
            crc32=checksum,
        )
        for assignment, checksum in zip(layout, checksums, strict=True)
    )  # fmt: skip


def read_block(store: Store, manifest: Manifest, saved: SavedBox) -> bytes:
    """Read the bytes of one box and verify their length and checksum.

    Raises:
        CheckpointError: The bytes are missing, or differ from those that were written.
    """
    key = manifest.file_key(saved)
    try:
        data = store.get(key, start=saved.start, num_bytes=saved.num_bytes)
    except KeyError:
        raise missing_file(key, saved) from None
    check_block(key, saved, num_bytes=len(data), checksum=crc32(data))
    return data


def read_header(store: Store, manifest: Manifest, key: str) -> bytes:
    """Read the header of the data file ``key``, and verify it where the manifest has its checksum.

    Raises:
        CheckpointError: The bytes differ from those that were written.
    """
    num_bytes = manifest.header_sizes()[key]
    header = store.get(key, num_bytes=num_bytes)
    wanted = manifest.headers.get(key.rpartition("/")[2])
    if wanted is not None and crc32(header) != wanted:
        raise _changed(
            f"{key}, bytes 0 to {num_bytes} (its header)",
            f"their crc32 is {crc32(header):08x}, not {wanted:08x}",
        )
    return header


def check_block(key: str, saved: SavedBox, *, num_bytes: int, checksum: int) -> None:
    """Compare length and crc32 of a box read from the file ``key`` with the manifest's.

    Raises:
        CheckpointError: One of the two differs.
    """
    if num_bytes != saved.num_bytes:
        raise _corrupt(key, saved, f"only {num_bytes} bytes are there")
    if checksum != saved.crc32:
        raise _corrupt(key, saved, f"their crc32 is {checksum:08x}, not {saved.crc32:08x}")


def missing_file(key: str, saved: SavedBox) -> CheckpointError:
    """Return the error for a missing file that should hold the box ``saved``."""
    return _corrupt(key, saved, "the file is missing")


def safetensors_header(entries: Mapping[str, object]) -> bytes:
    """Return the header of a safetensors file: its length in 8 bytes, then ``entries`` as JSON."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    # safetensors lets spaces follow the JSON; with them the data begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry_name(assignment: WriteAssignment) -> str:
    """Return tensor and first index of a block, ``model/layers.0.attention.q.weight@128,0``."""
    return f"{assignment.tensor}@{','.join(map(str, assignment.box.offset))}"


def _corrupt(key: str, saved: SavedBox, fact: str) -> CheckpointError:
    end = saved.start + saved.num_bytes
    return _changed(f"{key}, bytes {saved.start} to {end} ({saved.tensor})", fact)


def _changed(place: str, fact: str) -> CheckpointError:
    return CheckpointError(
        fact=f"{place}: {fact}",
        rule="every block must be as it was written",
        remedy="restore from an older checkpoint; raymega checkpoint list shows them",
    )
