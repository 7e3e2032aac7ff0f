"""Index of a checkpoint's boxes, for worlds whose boxes do not fit into the manifest.

The manifest then is a small root: it lists the tensors, the data files and the parts of the index. A
part is a Parquet file with a row for each box of some tensors; a rank reads the parts that name its
own tensors. Parts are written before the root, and the root has their checksums. So a reader of the
root sees whole parts or a damaged checkpoint, and creating the root once creates the checkpoint once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from isal.isal_zlib import crc32

from raymega.box import Box
from raymega.checkpoint.format.box_table import MAX_DIMS, ROW, BoxTable, SavedTensor
from raymega.errors import CheckpointError
from raymega.storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

INLINE_BOXES = 8_192
"""Most boxes that the manifest itself lists: 1.8 MB of JSON."""
PART_BOXES = 262_144
"""Most boxes of a part: 3 MB, one request."""
ROW_GROUP_BOXES = 16_384
"""Boxes that a reader of a part holds at once: 1 MB."""
_DIMS = tuple(f"{kind}{dim}" for kind in ("offset", "shape") for dim in range(MAX_DIMS))
_SCALARS = ("tensor", "file", "start", "num_bytes", "crc32")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexPart:
    """A part of the index.

    Attributes:
        file: Name of its file, relative to the checkpoint.
        num_bytes: Size of the file.
        crc32: ``zlib.crc32`` of the file.
        num_boxes: Number of its rows.
        tensors: First and last of the index's tensors with a box in it, by number.
    """

    file: str
    num_bytes: int
    crc32: int
    num_boxes: int
    tensors: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class BoxIndex:
    """Summary of a checkpoint's boxes, which its root manifest has in their place.

    Attributes:
        total_bytes: Size of all tensors in bytes.
        tensors: Tensors in the order of the parts: by the part of the name after its kind, then by kind.
        files: Names of the data files.
        file_sizes: Size of each data file in bytes.
        header_sizes: Bytes before the first box of each data file.
        parts: Parts of the index, in order.
    """

    total_bytes: int
    tensors: tuple[SavedTensor, ...]
    files: tuple[str, ...]
    file_sizes: tuple[int, ...]
    header_sizes: tuple[int, ...]
    parts: tuple[IndexPart, ...]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape of each tensor, by saved name."""
        return {tensor.name: tuple(tensor.shape) for tensor in self.tensors}

    def read(
        self, store: Store, folder: str, blocks: Mapping[str, Sequence[Box]] | None
    ) -> BoxTable:
        """Return the boxes that meet a block of ``blocks``, by saved name; all boxes for None.

        Args:
            store: Store of the run.
            folder: Prefix of the checkpoint's keys.
            blocks: Blocks of the tensors that the caller wants.

        Raises:
            CheckpointError: A part is missing or damaged.
        """
        empty = BoxTable(self.tensors, self.files)
        wanted = None if blocks is None else [t.name in blocks for t in self.tensors]
        chosen = [empty.rows]
        for part in self.parts:
            first, last = part.tensors
            if wanted is not None and not any(wanted[first : last + 1]):
                continue
            for rows in _row_groups(_read_part(store, folder + part.file, part)):
                table = empty.chosen(rows)
                chosen.append((table if blocks is None else table.meeting(blocks)).rows)
        return empty.chosen(np.concatenate(chosen))


def split(boxes: BoxTable, prefix: str) -> tuple[BoxIndex, Iterator[tuple[str, bytes]]]:
    """Return the index of ``boxes``, and the name and content of each part.

    Args:
        boxes: All boxes of a checkpoint.
        prefix: Begin of the names of the parts' files.
    """
    # tensors of a layer side by side, whatever their kind, so that a stage's are in few parts
    by_layer = sorted(range(len(boxes.tensors)), key=lambda at: _place(boxes.tensors[at]))
    new_number = np.empty(len(by_layer), np.int32)
    new_number[by_layer] = np.arange(len(by_layer))
    rows = boxes.rows.copy()
    rows["tensor"] = new_number[rows["tensor"]]
    rows = rows[np.argsort(rows["tensor"], kind="stable")]
    # parts of equal numbers of boxes
    parts, contents = [], []
    for number, at in enumerate(range(0, len(rows), PART_BOXES)):
        part = rows[at : at + PART_BOXES]
        content = _to_parquet(part)
        name = f"{prefix}-{number:05d}.parquet"
        ends = (int(part["tensor"][0]), int(part["tensor"][-1]))
        parts.append(
            IndexPart(
                file=name,
                num_bytes=len(content),
                crc32=crc32(content),
                num_boxes=len(part),
                tensors=ends,
            )
        )
        contents.append((name, content))
    sizes, headers = boxes.file_sizes(), boxes.header_sizes()
    index = BoxIndex(
        total_bytes=int(rows["num_bytes"].sum()),
        tensors=tuple(boxes.tensors[at] for at in by_layer),
        files=boxes.files,
        file_sizes=tuple(sizes.get(file, 0) for file in boxes.files),
        header_sizes=tuple(headers.get(file, 0) for file in boxes.files),
        parts=tuple(parts),
    )
    return index, iter(contents)


def _place(tensor: SavedTensor) -> tuple[str, str]:
    kind, _, name = tensor.name.partition("/")
    return name, kind


def _read_part(store: Store, key: str, part: IndexPart) -> bytes:
    try:
        data = store.get(key)
    except KeyError:
        data = None
    if data is None or (len(data), crc32(data)) != (part.num_bytes, part.crc32):
        found = (
            "is missing" if data is None else f"has {len(data)} bytes with crc32 {crc32(data):08x}"
        )
        raise CheckpointError(
            fact=f"{key} {found}",
            rule=f"this part of the index has {part.num_bytes} bytes with crc32 {part.crc32:08x}",
            remedy="restore from an older checkpoint; raymega checkpoint list shows them",
        )
    return data


def _to_parquet(rows: np.ndarray) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {name: rows[name] for name in _SCALARS}
    for kind in ("offset", "shape"):
        columns |= {f"{kind}{dim}": rows[kind][:, dim] for dim in range(MAX_DIMS)}
    sink = pa.BufferOutputStream()
    # by their bytes, both ways: Arrow's own conversions would import pandas, 0.3 s of each process
    arrays = {
        name: pa.Array.from_buffers(
            pa.from_numpy_dtype(column.dtype),
            len(column),
            [None, pa.py_buffer(np.ascontiguousarray(column))],
        )
        for name, column in columns.items()
    }
    parquet.write_table(
        pa.table(arrays),
        sink,
        compression="zstd",
        row_group_size=ROW_GROUP_BOXES,
        write_statistics=False,
    )
    return bytes(sink.getvalue())


def _row_groups(data: bytes) -> Iterator[np.ndarray]:
    import pyarrow as pa
    from pyarrow import parquet

    file = parquet.ParquetFile(pa.BufferReader(data))
    for number in range(file.num_row_groups):
        group = file.read_row_group(number, use_threads=False)
        rows = np.empty(group.num_rows, ROW)
        for name in _SCALARS:
            rows[name] = _numbers(group[name].chunks)
        for name in _DIMS:
            rows[name[:-1]][:, int(name[-1])] = _numbers(group[name].chunks)
        yield rows


def _numbers(chunks: Sequence[pa.Array]) -> np.ndarray:
    return np.concatenate(
        [
            np.frombuffer(
                each.buffers()[1], str(each.type), len(each), each.offset * each.type.bit_width // 8
            )
            for each in chunks
        ]
    )
