"""State of a curation in its output below ``_state/``, from which it continues where it was killed.

It owns names there, and tables whose parts other tasks read. An object appears only when it is whole,
in a folder as in an object store, so a task that has written its last object is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from raymega.prepare.records import STATE_FOLDER
from raymega.storage.registry import open_store
from raymega.storage.store import Store

Rows = npt.NDArray[Any]
HEAD = np.dtype("<i8")
READS_AT_ONCE = 16
PORTION_NUMBERS, WHOLE_NUMBERS = 1 << 20, 1 << 23
"""Numbers of a set that are read at once, and of all sets of a group that may be."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Objects of one curation; this value is sent to the tasks."""

    uri: str

    @property
    def store(self) -> Store:
        """Store of the whole output."""
        return _store(self.uri)

    def put(self, name: str, *content: bytes | memoryview) -> None:
        """Write an object below ``_state/``, of one or several parts in order."""
        self.put_chunks(name, content)

    def put_chunks(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write an object whose parts are made while it is written."""
        self.store.put(f"{STATE_FOLDER}/{name}", chunks, overwrite=True)

    def get(self, name: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Return an object below ``_state/``, or some of its bytes."""
        return self.store.get(f"{STATE_FOLDER}/{name}", start=start, num_bytes=num_bytes)

    def get_all(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the objects in order."""
        return _some_at_once(self.get, names)

    def names(self, prefix: str) -> set[str]:
        """Return the names below ``_state/`` that begin with ``prefix``, without it."""
        whole = f"{STATE_FOLDER}/{prefix}"
        return {key.removeprefix(whole) for key in self.store.list(whole)}

    def delete(self, prefix: str) -> None:
        """Remove the objects whose names begin with ``prefix``."""
        for name in sorted(self.names(prefix)):
            self.store.delete(f"{STATE_FOLDER}/{prefix}{name}")


def put_table(state: State, name: str, rows: Rows, parts: npt.NDArray[Any], num_parts: int) -> None:
    """Write rows, of which those of one part lie side by side.

    Args:
        state: Place.
        name: Name of the table.
        rows: Rows in the order in which a part has them, [N].
        parts: Number of the part of each row, [N].
        num_parts: Number of parts.
    """
    order = np.argsort(parts, kind="stable")
    borders = np.searchsorted(parts[order], np.arange(num_parts + 1))
    state.put(name, borders.astype(HEAD).tobytes(), rows[order].tobytes())


def get_part(state: State, name: str, part: int, num_parts: int, kind: np.dtype[Any]) -> Rows:
    """Return the rows of one part of a table, [N]."""
    head = state.get(name, start=part * HEAD.itemsize, num_bytes=2 * HEAD.itemsize)
    first, last = np.frombuffer(head, dtype=HEAD).tolist()
    if first == last:
        return np.zeros(0, dtype=kind)
    start = (num_parts + 1) * HEAD.itemsize + first * kind.itemsize
    content = state.get(name, start=start, num_bytes=(last - first) * kind.itemsize)
    return np.frombuffer(content, dtype=kind)


def get_parts(
    state: State, names: Sequence[str], part: int, num_parts: int, kind: np.dtype[Any]
) -> Rows:
    """Return the rows of one part of several tables, in the order of their names."""
    read = partial(get_part, state, part=part, num_parts=num_parts, kind=kind)
    return np.concatenate([np.zeros(0, dtype=kind), *_some_at_once(read, names)])


def get_keys(
    state: State, folder: str, names: Sequence[str], part: int, num_parts: int, kind: np.dtype[Any]
) -> Rows:
    """Return the rows of one part of the tables ``FOLDER/keys/NAME``, with the numbers of their groups."""
    found = [np.zeros(0, dtype=kind)]
    read = partial(get_part, state, part=part, num_parts=num_parts, kind=kind)
    tables = [f"{folder}/keys/{name}" for name in names]
    for number, table in enumerate(_some_at_once(read, tables)):
        rows = table.copy()
        # Not in the table: a group keeps its tables when a new file before it moves its number.
        rows["group"] = number
        found.append(rows)
    return np.concatenate(found)


class Arrays:
    """Sorted sets of uint64 in one object, each read when it is asked for, or with ``is_whole`` all at once.

    The object has the number of sets, where each begins and the last ends, then the numbers. It is read by
    portions all the same if it has more than 64 MiB.
    """

    def __init__(self, state: State, name: str, *, is_whole: bool = False) -> None:
        self._state, self._name = state, name
        count = int(np.frombuffer(state.get(name, num_bytes=8), dtype=HEAD)[0])
        head = state.get(name, start=8, num_bytes=8 * (count + 1))
        self._ends, self._first = np.frombuffer(head, dtype=HEAD), 8 * (count + 2)
        is_small = int(self._ends[-1]) <= WHOLE_NUMBERS
        self._content = state.get(name) if is_whole and is_small else b""

    def size(self, index: int) -> int:
        """Return the number of numbers of a set."""
        return int(self._ends[index + 1] - self._ends[index])

    def portions(self, index: int) -> Iterator[npt.NDArray[np.uint64]]:
        """Yield a set in portions of at most 8 MiB, in order."""
        first, last = self._ends[index : index + 2].tolist()
        for start in range(first, last, PORTION_NUMBERS):
            count, place = min(PORTION_NUMBERS, last - start), self._first + 8 * start
            if self._content:
                yield np.frombuffer(self._content, dtype=np.uint64, count=count, offset=place)
                continue
            content = self._state.get(self._name, start=place, num_bytes=8 * count)
            yield np.frombuffer(content, dtype=np.uint64)


def _some_at_once(read: Callable[[str], T], names: Sequence[str]) -> Iterator[T]:
    """Yield what is read of each name, in order; some are read at once, as a store answers after a while."""
    with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="curate-read") as pool:
        for start in range(0, len(names), READS_AT_ONCE):
            yield from pool.map(read, names[start : start + READS_AT_ONCE])


def runs(*columns: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the number of each row in its run of equal rows, then the first row of that run, [N]."""
    count = len(columns[0])
    is_new = np.ones(count, dtype=bool)
    if count:
        is_new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    firsts = np.maximum.accumulate(np.where(is_new, np.arange(count), 0))
    yield np.arange(count) - firsts
    yield firsts


@cache
def _store(uri: str) -> Store:
    # Once a process: a client takes 0.1 CPU seconds to make, and may be shared by threads.
    return open_store(uri)
