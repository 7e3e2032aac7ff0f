"""Saved boxes of many ranks as columns: a checkpoint of 16,384 ranks has 3.4 million of them.

As objects they would take a kilobyte each and a microsecond for every look at one; as rows of one
array they take 60 bytes, and names and shapes are there once. The table behaves as a sequence of
SavedBox; code for large numbers of boxes uses the rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from raymega.box import Box, SavedBox
from raymega.errors import CheckpointError

MAX_DIMS = 4
ROW = np.dtype(
    [
        ("tensor", "<i4"),
        ("file", "<i4"),
        ("start", "<i8"),
        ("num_bytes", "<i8"),
        ("crc32", "<u4"),
        ("offset", "<i4", (MAX_DIMS,)),
        ("shape", "<i4", (MAX_DIMS,)),
    ]
)
"""A box: numbers of its tensor and its file, then SavedBox's fields; dims that a tensor lacks are 0 and 1."""

Rows = NDArray[Any]


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint: saved name ``kind/name``, element type, and shape of the whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class BoxTable(Sequence[SavedBox]):
    """Immutable sequence of saved boxes, kept as an array of type ROW.

    Attributes:
        tensors: Tensors that rows refer to by number.
        files: Names of files that rows refer to by number.
        rows: Array of type ROW, with a row for each box.
    """

    __slots__ = ("files", "rows", "tensors")

    def __init__(
        self, tensors: Sequence[SavedTensor], files: Sequence[str], rows: Rows | None = None
    ) -> None:
        self.tensors, self.files = tuple(tensors), tuple(files)  # a tuple stays the same object
        self.rows = np.empty(0, ROW) if rows is None else rows

    @classmethod
    def of(cls, boxes: Sequence[SavedBox]) -> BoxTable:
        """Return the table of ``boxes``; a table is returned as it is.

        Raises:
            CheckpointError: A tensor has more than MAX_DIMS dims.
        """
        if isinstance(boxes, BoxTable):
            return boxes
        tensors: dict[SavedTensor, int] = {}
        files: dict[str, int] = {}
        rows = np.empty(len(boxes), ROW)
        for number, each in enumerate(boxes):
            tensor = SavedTensor(each.tensor, each.dtype, each.global_shape)
            rows[number] = (
                tensors.setdefault(tensor, len(tensors)),
                files.setdefault(each.file, len(files)),
                each.start, each.num_bytes, each.crc32,
                _padded(each.box.offset, 0, each.tensor), _padded(each.box.shape, 1, each.tensor),
            )  # fmt: skip
        return cls(tuple(tensors), tuple(files), rows)

    @classmethod
    def joined(cls, tables: Iterable[Sequence[SavedBox]]) -> BoxTable:
        """Return the rows of all ``tables`` in order, with one numbering of tensors and files."""
        tensors: dict[SavedTensor, int] = {}
        files: dict[str, int] = {}
        parts = [cls.of(table) for table in tables]
        rows = np.concatenate([np.empty(0, ROW), *(table.rows for table in parts)])
        # ranks of a stage have one and the same tuple of tensors, which is numbered once
        numbers: dict[int, Rows] = {}
        at = 0
        for table in parts:
            if id(table.tensors) not in numbers:
                numbers[id(table.tensors)] = _numbers(table.tensors, tensors)
            mine = rows[at : at + len(table)]
            mine["tensor"] = numbers[id(table.tensors)][mine["tensor"]]
            mine["file"] = _numbers(table.files, files)[mine["file"]]
            at += len(table)
        return cls(tuple(tensors), tuple(files), rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> SavedBox: ...
    @overload
    def __getitem__(self, index: slice) -> BoxTable: ...
    def __getitem__(self, index: int | slice) -> SavedBox | BoxTable:
        if isinstance(index, slice):
            return self.chosen(self.rows[index])
        return next(iter(self.chosen(self.rows[index].reshape(1))))

    def __iter__(self) -> Iterator[SavedBox]:
        columns = (self.rows[name].tolist() for name in self.rows.dtype.names or ())
        return map(self._box, zip(*columns, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return (
            f"BoxTable({len(self)} boxes of {len(self.tensors)} tensors in {len(self.files)} files)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (json.dumps(self.tensors), self.files, self.rows)

    def chosen(self, rows: Rows) -> BoxTable:
        """Return a table of other ``rows`` with the same numbering."""
        return BoxTable(self.tensors, self.files, rows)

    def by_tensor(self) -> Iterator[tuple[SavedTensor, Rows]]:
        """Yield each tensor that has rows, and its rows in order."""
        order = np.argsort(self.rows["tensor"], kind="stable")
        numbers, starts = np.unique(self.rows["tensor"][order], return_index=True)
        for number, part in zip(numbers, np.split(order, starts[1:]), strict=True):
            yield self.tensors[number], self.rows[part]

    def meeting(self, blocks: Mapping[str, Sequence[Box]]) -> BoxTable:
        """Return the rows that have an element in common with a block of their tensor, by saved name."""
        found = np.zeros(len(self), bool)
        for number, tensor in enumerate(self.tensors):
            if tensor.name not in blocks:
                continue
            (places,) = np.nonzero(self.rows["tensor"] == number)
            rows, dims = self.rows[places], len(tensor.shape)
            first = rows["offset"][:, :dims]
            after = first + rows["shape"][:, :dims]
            for block in blocks[tensor.name]:
                offset, shape = np.array(block.offset, int), np.array(block.shape, int)
                found[places] |= ((first < offset + shape) & (after > offset)).all(axis=1)
        return self.chosen(self.rows[found])

    def file_sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file, by name; a file ends with its last box."""
        sizes = np.zeros(len(self.files), np.int64)
        np.maximum.at(sizes, self.rows["file"], self.rows["start"] + self.rows["num_bytes"])
        return self._by_file(sizes)

    def header_sizes(self) -> dict[str, int]:
        """Return the bytes before the first box of every file, by name."""
        sizes = np.full(len(self.files), np.iinfo(np.int64).max)
        np.minimum.at(sizes, self.rows["file"], self.rows["start"])
        return self._by_file(sizes)

    def _by_file(self, values: NDArray[np.int64]) -> dict[str, int]:
        """Return the values of the files that have rows, in the order of their first rows."""
        numbers, first = np.unique(self.rows["file"], return_index=True)
        return {self.files[at]: int(values[at]) for at in numbers[np.argsort(first)]}

    def _box(self, row: tuple[Any, ...]) -> SavedBox:
        tensor, file, start, num_bytes, checksum, offset, shape = row
        name, dtype, whole = self.tensors[tensor]
        dims = len(whole)
        return SavedBox(
            tensor=name, dtype=dtype, global_shape=tuple(whole),
            box=Box(offset=tuple(offset[:dims]), shape=tuple(shape[:dims])),
            file=self.files[file], start=start, num_bytes=num_bytes, crc32=checksum,
        )  # fmt: skip


def _padded(values: tuple[int, ...], fill: int, tensor: str) -> tuple[int, ...]:
    if len(values) > MAX_DIMS:
        raise CheckpointError(
            fact=f"{tensor} has {len(values)} dims",
            rule=f"a checkpoint holds tensors of at most {MAX_DIMS}",
            remedy="fold dims together in the module that owns it",
        )
    return (*values, *(fill,) * (MAX_DIMS - len(values)))


def _numbers(names: Sequence[Any], known: dict[Any, int]) -> Rows:
    """Return the numbers of ``names`` in ``known``, which gains the names that it lacks."""
    return np.array([known.setdefault(name, len(known)) for name in names] or [0], np.int32)


def _unpickled(tensors: str, files: tuple[str, ...], rows: Rows) -> BoxTable:
    return BoxTable(_tensors_of(tensors), files, rows)


@lru_cache(maxsize=256)
def _tensors_of(text: str) -> tuple[SavedTensor, ...]:
    """Return the tensors of a table's text; the reports of a stage's ranks share one tuple."""
    return tuple(SavedTensor(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(text))
