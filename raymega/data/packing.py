"""Packs whole documents into rows of S tokens: best fit, longest first, in windows of the stream.

The rows depend on the documents' lengths alone, so they are the same on every grid and in every
epoch. `raymega.data.order` decides the order of rows. No window is laid out and no token is read until a row
is requested; only the number of each window's rows is needed before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raymega.data.images.stored import HeldImages
from raymega.data.row_counts import LONGEST_ROW, count_rows, windows_at_once
from raymega.data.rows import TEXT, Image, Row, ShardRows

Ints = npt.NDArray[np.int64]
FEW_WINDOWS = 12
"""Windows below which they are counted by laying them out."""
KEPT_SHARDS, KEPT_WINDOWS = 4, 512
"""Shards whose pieces a process keeps, and windows whose rows: about 70 kB each."""


class Documents(Protocol):
    """Documents of a split by number."""

    @property
    def lengths(self) -> npt.NDArray[np.integer]:
        """Number of tokens of each document, [N], at least 1."""

    @property
    def shards(self) -> Sequence[tuple[int, int]]:
        """Number of documents and of bytes of each shard."""

    def need(self, shards: Sequence[int]) -> None:
        """Take the shards that are read next."""

    @property
    def is_truncated(self) -> bool:
        """True if a document's tokens from S on are left out: they mean little without its beginning."""

    def read(self, document: int, start: int, stop: int) -> Ints:
        """Return tokens [start, stop) of one document."""

    def counted(self, document: int, start: int, stop: int) -> npt.NDArray[Any] | None:
        """Return which of tokens [start, stop) of one document count as labels; None if all do.

        They are bools, or bytes with labels where the job reads such.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Pieces of documents: those longer than S are cut after every S tokens.

    Attributes:
        document: Document number of each piece, [P].
        start: Offset in tokens of each piece in its document, [P].
        length: Number of tokens of each piece, at most S, [P].
    """

    document: Ints
    start: Ints
    length: Ints


def cut_documents(lengths: Ints, seq_len: int, *, is_truncated: bool = False) -> Pieces:
    """Cut documents into pieces of at most S tokens, in stream order; if truncated, one of each."""
    # number of pieces of each document, then each piece's document and start
    counts = np.ones_like(lengths) if is_truncated else -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(len(document), dtype=np.int64) - first) * seq_len
    return Pieces(
        document=document, start=start, length=np.minimum(lengths[document] - start, seq_len)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRows:
    """Rows of each packing window of a split: what is known of its packing without laying out a row.

    Attributes:
        rows: Number of rows of each window, [W].
        shard_windows: Number of windows of each shard, [N].
        num_tokens: Tokens of all pieces, padding apart.
        num_pairs: Sum of the squared lengths of all pieces.
    """

    rows: Ints
    shard_windows: Ints
    num_tokens: int
    num_pairs: float


def window_rows(pieces_of: Iterator[tuple[Ints, Ints]], seq_len: int, *, window: int) -> WindowRows:
    """Count the rows of all packing windows; memory does not grow with the number of documents.

    Args:
        pieces_of: Lengths of each shard's pieces in stream order, without and with padding.
        seq_len: Number of tokens of a row (S).
        window: Number of consecutive pieces of a shard that are packed together.
    """
    counts, shard_windows, num_tokens, num_pairs = list[Ints](), list[int](), 0, 0.0
    waiting, at_once = list[Ints](), windows_at_once(seq_len, window)
    for lengths, padded in pieces_of:
        num_tokens += int(lengths.sum())
        num_pairs += float((lengths.astype(np.float64) ** 2).sum())
        waiting += [padded[first : first + window] for first in range(0, len(padded), window)]
        shard_windows.append(-(-len(padded) // window))
        while len(waiting) >= at_once:
            counts.append(_count(waiting[:at_once], seq_len))
            del waiting[:at_once]
    counts.append(_count(waiting, seq_len))
    return WindowRows(
        rows=np.concatenate(counts),
        shard_windows=np.array(shard_windows, dtype=np.int64),
        num_tokens=num_tokens,
        num_pairs=num_pairs,
    )


def _count(windows: Sequence[Ints], seq_len: int) -> Ints:
    """Return the rows of each window, [W]."""
    # The tree of bits costs the same for one window as for a hundred.
    if len(windows) < FEW_WINDOWS or seq_len > LONGEST_ROW:
        rows = [len(best_fit(lengths.tolist(), seq_len)) for lengths in windows]
        return np.array(rows, dtype=np.int64)
    longest = max(map(len, windows))
    return count_rows(
        np.stack([np.pad(each, (0, longest - len(each))) for each in windows]), seq_len
    )


def best_fit(lengths: list[int], seq_len: int) -> list[list[int]]:
    """Pack one window: each piece goes to the row with least room left, ties to the oldest row.

    Returns:
        Indices of each row's pieces, ascending.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    # longest first; equal lengths in stream order, so that the packing is deterministic
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[index], 0))
        # The fullest row that still has room, or else a new row.
        free, row = room.pop(at) if at < len(room) else (seq_len, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        if free > lengths[index]:
            insort(room, (free - lengths[index], row))
    return [sorted(row) for row in rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPiece:
    """Piece of a document at its place in a row.

    Attributes:
        source: Packed rows that the piece is of.
        document: Number of the document.
        first: Offset in tokens of the piece in the document.
        start: Offset in tokens of the piece in the row.
        length: Number of tokens of the piece.
        padded: Number of tokens including the padding after it.
    """

    source: PackedSource
    document: int
    first: int
    start: int
    length: int
    padded: int


Keep = Callable[[Callable[[], WindowRows]], WindowRows]


def no_keep(make: Callable[[], WindowRows]) -> WindowRows:
    """Count a split's rows for this process alone."""
    return make()


def to_tables(counted: WindowRows) -> dict[str, npt.NDArray[np.generic]]:
    """Return the counts as arrays by name, for other processes."""
    totals = np.array([counted.num_tokens, counted.num_pairs])
    return {"rows": counted.rows, "shard_windows": counted.shard_windows, "totals": totals}


def from_tables(tables: Mapping[str, npt.NDArray[Any]]) -> WindowRows:
    """Return the counts of :func:`to_tables`."""
    num_tokens, num_pairs = tables["totals"].tolist()
    return WindowRows(
        rows=tables["rows"],
        shard_windows=tables["shard_windows"],
        num_tokens=int(num_tokens),
        num_pairs=num_pairs,
    )


class PackedSource:
    """Rows of S tokens: whole documents end to end, then padding.

    If a document continues in another piece, the label of a piece's last token is the document's
    next token; if it ends there, that label is masked. So every token but each document's first is
    predicted once in an epoch. Padding is masked everywhere. The padding of a piece to a multiple
    of ``multiple`` follows its tokens, so that none of them attends to it. The rest of a row is one
    more document. A packing window has pieces of one shard, and is laid out when a row of it is read.

    Attributes:
        seq_len: Number of tokens of a row (S).
        num_windows: Number of rows.
        shards: Rows and bytes of each shard.
        efficiency: Share of all rows' tokens that are not padding.
        context: Mean over tokens of the length of their piece.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        seq_len: int,
        window: int,
        multiple: int = 1,
        keep: Keep = no_keep,
    ) -> None:
        """Count the documents' rows; ``multiple`` must divide ``seq_len``.

        Args:
            documents: Documents of the split.
            seq_len: Number of tokens of a row (S).
            window: Number of consecutive pieces of a shard that are packed together.
            multiple: Multiple to which each piece is padded.
            keep: Function that returns the rows of a split's windows, as kept or from the function given.
        """
        self.documents, self.seq_len = documents, seq_len
        self._window, self._multiple = window, multiple
        self._borders = np.cumsum([0, *(shard[0] for shard in documents.shards)])
        shards = range(len(documents.shards))
        counted = keep(
            lambda: window_rows(
                ((cut.length, self._padded(cut.length)) for cut in map(self._cut, shards)),
                seq_len,
                window=window,
            )
        )
        # numbers of rows and windows up to the end of each window and shard
        self._row_ends = np.cumsum(counted.rows)
        self._window_ends = np.cumsum(counted.shard_windows)
        ends = np.concatenate([[0], self._row_ends])[np.concatenate([[0], self._window_ends])]
        self.shards = ShardRows(
            rows=np.diff(ends), num_bytes=np.array([size for _, size in documents.shards])
        )
        self.num_windows = int(self._row_ends[-1])
        self.efficiency = counted.num_tokens / (self.num_windows * seq_len)
        self.context = counted.num_pairs / counted.num_tokens
        self._pieces = lru_cache(KEPT_SHARDS)(self._cut)
        self._rows = lru_cache(KEPT_WINDOWS)(self._lay_out)
        # set by who opens a dataset with images: those of tokens [start, stop) of a document
        self.images_of: Callable[[int, int, int], HeldImages] | None = None

    def need(self, shards: Sequence[int]) -> None:
        """Take the shards that are read next."""
        self.documents.need(shards)

    def row(self, index: int) -> Row:
        """Read row ``index``."""
        return join(self.held(index), self.seq_len)

    def images_in(self, index: int) -> tuple[Image, ...]:
        """Return the images of row ``index``; reads no tokens and no pixels."""
        if self.images_of is None:
            return ()
        held = self.held(index)
        found = (
            self.images_of(each.document, each.first, each.first + each.length) for each in held
        )
        return tuple(image for each in found for image in each.images)

    def held(self, index: int) -> list[PlacedPiece]:
        """Return the pieces of row ``index``; reads no tokens."""
        number = int(np.searchsorted(self._row_ends, index, side="right"))
        shard = int(np.searchsorted(self._window_ends, number, side="right"))
        document, first, length, ends = self._rows(number)
        # the row's pieces in its window
        row = index - int(self._row_ends[number]) + len(ends)
        mine = slice(int(ends[row - 1]) if row else 0, int(ends[row]))
        # pieces lie end to end, each with its padding
        padded = self._padded(length[mine].astype(np.int64))
        starts = np.cumsum(padded) - padded
        fields = (document[mine] + self._borders[shard], first[mine], starts, length[mine], padded)
        return [
            PlacedPiece(source=self, document=d, first=f, start=s, length=n, padded=p)
            for d, f, s, n, p in zip(*(field.tolist() for field in fields), strict=True)
        ]

    def read(self, held: PlacedPiece) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Read a piece and, unless its document ends with it, the token after it; and which count as labels."""
        document, start = held.document, held.first
        stop = min(start + held.length + 1, int(self.documents.lengths[document]))
        counted = self.documents.counted(document, start, stop)
        if counted is None:
            counted = np.ones(stop - start, dtype=np.bool_)
        return self.documents.read(document, start, stop), counted

    def _cut(self, shard: int) -> Pieces:
        """Cut the documents of a shard."""
        lengths = self.documents.lengths[self._borders[shard] : self._borders[shard + 1]]
        return cut_documents(
            lengths.astype(np.int64), self.seq_len, is_truncated=self.documents.is_truncated
        )

    def _lay_out(self, number: int) -> tuple[npt.NDArray[np.integer], ...]:
        """Return document in the shard, offset and length of a window's pieces, row after row, and each row's end."""
        shard = int(np.searchsorted(self._window_ends, number, side="right"))
        inside = number - int(self._window_ends[shard - 1] if shard else 0)
        cut, mine = self._pieces(shard), slice(inside * self._window, (inside + 1) * self._window)
        rows = best_fit(self._padded(cut.length[mine]).tolist(), self.seq_len)
        order = np.array([piece for row in rows for piece in row], dtype=np.int64)
        # documents of a shard fit 32 bits, as do pieces; a document's tokens may not
        document, length = (
            field[mine][order].astype(np.int32) for field in (cut.document, cut.length)
        )
        ends = np.cumsum([len(row) for row in rows], dtype=np.int32)
        return document, cut.start[mine][order], length, ends

    def _padded(self, lengths: Ints) -> Ints:
        return -(-lengths // self._multiple) * self._multiple


def join(pieces: Sequence[PlacedPiece], num_tokens: int) -> Row:
    """Read pieces into a row of ``num_tokens`` tokens, end to end, each padded; sources may differ."""
    tokens, labels = (np.zeros(num_tokens, dtype=np.int64) for _ in range(2))
    mask, at = np.zeros(num_tokens, dtype=np.bool_), 0
    images, places = list[Image](), None
    for held in pieces:
        # One token more than the piece if its document continues: the last label.
        words, counted = held.source.read(held)
        tokens[at : at + held.length] = words[: held.length]
        labels[at : at + len(words) - 1] = words[1:]
        mask[at : at + len(words) - 1] = counted[1:]
        if held.source.images_of is not None:
            places = np.full(num_tokens, TEXT, dtype=np.int64) if places is None else places
            found = held.source.images_of(held.document, held.first, held.first + held.length)
            places[at : at + held.length] = found.after(len(images))
            images += found.images
        at += held.padded
    padding = (num_tokens - at,) if at < num_tokens else ()
    documents = (*(held.padded for held in pieces), *padding)
    return Row(
        tokens=tokens, labels=labels, mask=mask, documents=documents, images=tuple(images),
        image_places=places,
    )  # fmt: skip
