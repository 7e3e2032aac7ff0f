"""Rows and sorted sets that a group's task collects: beyond a few megabytes they wait in a temporary file.

It owns what is between memory and the state's objects; names of objects are in `raymega.curate.state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt

from raymega.curate.state import HEAD, Rows, State

SPOOL_BYTES = 8 << 20
"""Size of what waits in memory."""
COPIED_BYTES = 1 << 20


class TableSpool:
    """Rows of a table that :func:`raymega.curate.state.get_part` reads by parts, in blocks."""

    def __init__(self, kind: np.dtype[Any], num_parts: int) -> None:
        self._kind, self._num_parts = kind, num_parts
        self._file = SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115  # closed by write
        # First row of each part in each block, in rows of the file.
        self._borders = list[npt.NDArray[np.int64]]()
        self._count = 0

    def add(self, rows: Rows, parts: npt.NDArray[Any]) -> None:
        """Append a block of rows, [N], each with the number of its part, [N]."""
        order = np.argsort(parts, kind="stable")
        borders = np.searchsorted(parts[order], np.arange(self._num_parts + 1))
        self._borders.append(borders.astype(np.int64) + self._count)
        self._file.write(rows[order].tobytes())
        self._count += len(rows)

    def write(self, state: State, name: str) -> None:
        """Write the table: of each part the rows in the order in which they came."""
        borders = np.array(self._borders, dtype=np.int64).reshape(-1, self._num_parts + 1)
        sizes = np.diff(borders, axis=1).sum(axis=0)
        head = np.cumsum([0, *sizes.tolist()], dtype=HEAD)
        state.put_chunks(name, self._chunks(head.tobytes(), borders))
        self._file.close()

    def _chunks(self, head: bytes, borders: npt.NDArray[np.int64]) -> Iterator[bytes]:
        yield head
        size = self._kind.itemsize
        for part in range(self._num_parts):
            for first, last in borders[:, part : part + 2].tolist():
                self._file.seek(first * size)
                if last > first:
                    yield self._file.read((last - first) * size)


class SetSpool:
    """Sorted sets of numbers, one after the other, which :class:`raymega.curate.state.Arrays` reads."""

    def __init__(self) -> None:
        self._ends = [0]
        self._file = SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115  # closed by write

    def add(self, portions: Iterable[npt.NDArray[np.uint64]]) -> None:
        """Append a set, whose portions come in order."""
        end = self._ends[-1]
        for portion in portions:
            self._file.write(portion.astype("<u8", copy=False).tobytes())
            end += len(portion)
        self._ends.append(end)

    def write(self, state: State, name: str) -> None:
        """Write the object."""
        state.put_chunks(name, self._chunks())
        self._file.close()

    def _chunks(self) -> Iterator[bytes]:
        yield np.array([len(self._ends) - 1, *self._ends], dtype=HEAD).tobytes()
        self._file.seek(0)
        while content := self._file.read(COPIED_BYTES):
            yield content
