"""Packs whole documents into rows of S tokens: best fit, longest first, in windows of the stream.

The rows depend on the documents' lengths alone, so they are the same on every grid and in every
epoch. `raymega.data.order` decides the order of rows. No tokens are read until a row is requested.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from raymega.data.rows import Row

Ints = npt.NDArray[np.int64]


class Documents(Protocol):
    """Documents of a split by number."""

    @property
    def lengths(self) -> Ints:
        """Number of tokens of each document, [N], at least 1."""

    @property
    def is_truncated(self) -> bool:
        """True if a document's tokens from S on are left out: they mean little without its beginning."""

    def read(self, document: int, start: int, stop: int) -> Ints:
        """Return tokens [start, stop) of one document."""

    def counted(self, document: int, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Return which of tokens [start, stop) of one document count as labels; None if all do."""


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
class Packing:
    """Assignment of pieces to rows.

    Attributes:
        order: Numbers of the pieces, row after row, [P].
        ends: End index of each row in ``order``, [R].
    """

    order: Ints
    ends: Ints

    @property
    def num_rows(self) -> int:
        """Number of rows (R)."""
        return len(self.ends)

    def pieces(self, row: int) -> Ints:
        """Return the numbers of a row's pieces, in stream order."""
        return self.order[self.ends[row - 1] if row else 0 : self.ends[row]]


def pack(lengths: Ints, seq_len: int, *, window: int) -> Packing:
    """Pack pieces into rows by best fit decreasing, separately in each ``window`` pieces.

    Args:
        lengths: Number of tokens of each piece, at most ``seq_len``.
        seq_len: Number of tokens of a row (S).
        window: Number of consecutive pieces that are packed together; more leave less padding.
    """
    rows: list[list[int]] = []
    for first in range(0, len(lengths), window):
        rows += _best_fit(lengths[first : first + window].tolist(), seq_len, first)
    order = np.array([piece for row in rows for piece in row], dtype=np.int64)
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return Packing(order=order, ends=ends)


def _best_fit(lengths: list[int], seq_len: int, first: int) -> Iterator[list[int]]:
    """Pack one window: each piece goes to the row with least room left, ties to the oldest row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    # longest first; equal lengths in stream order, so that the packing is deterministic
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[index], 0))
        # The fullest row that still has room, or else a new row.
        free, row = room.pop(at) if at < len(room) else (seq_len, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(first + index)
        if free > lengths[index]:
            insort(room, (free - lengths[index], row))
    return map(sorted, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPiece:
    """A piece at its place in a row.

    Attributes:
        source: Packed rows that the piece is of.
        piece: Number of the piece.
        start: Offset in tokens of the piece in the row.
        length: Number of tokens of the piece.
        padded: Number of tokens including the padding after it.
    """

    source: PackedSource
    piece: int
    start: int
    length: int
    padded: int


class PackedSource:
    """Rows of S tokens: whole documents end to end, then padding.

    If a document continues in another piece, the label of a piece's last token is the document's
    next token; if it ends there, that label is masked. So every token but each document's first is
    predicted once in an epoch. Padding is masked everywhere. The padding of a piece to a multiple
    of ``multiple`` follows its tokens, so that none of them attends to it. The rest of a row is one
    more document.

    Attributes:
        seq_len: Number of tokens of a row (S).
        num_windows: Number of rows.
        efficiency: Share of all rows' tokens that are not padding.
        context: Mean over tokens of the length of their piece.
    """

    def __init__(
        self, documents: Documents, *, seq_len: int, window: int, multiple: int = 1
    ) -> None:
        """Pack the documents into rows; ``multiple`` must divide ``seq_len``."""
        self._documents, self.seq_len = documents, seq_len
        self._pieces = cut_documents(
            documents.lengths, seq_len, is_truncated=documents.is_truncated
        )
        self._padded = -(-self._pieces.length // multiple) * multiple
        self._packing = pack(self._padded, seq_len, window=window)
        self.num_windows = self._packing.num_rows
        length = self._pieces.length.astype(np.float64)
        self.efficiency = float(length.sum() / (self.num_windows * seq_len))
        self.context = float((length**2).sum() / length.sum())

    def row(self, index: int) -> Row:
        """Read row ``index``."""
        return join(self.held(index), self.seq_len)

    def held(self, index: int) -> list[PlacedPiece]:
        """Return the pieces of row ``index``; reads no tokens."""
        pieces = self._packing.pieces(index)
        # pieces lie end to end, each with its padding
        ends = np.cumsum(self._padded[pieces])
        return [
            PlacedPiece(
                source=self,
                piece=int(piece),
                start=int(end - self._padded[piece]),
                length=int(self._pieces.length[piece]),
                padded=int(self._padded[piece]),
            )
            for piece, end in zip(pieces, ends, strict=True)
        ]

    def read(self, piece: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Read a piece and, unless its document ends with it, the token after it; and which count as labels."""
        pieces = self._pieces
        document, start = int(pieces.document[piece]), int(pieces.start[piece])
        whole = int(self._documents.lengths[document])
        stop = min(start + int(pieces.length[piece]) + 1, whole)
        counted = self._documents.counted(document, start, stop)
        if counted is None:
            counted = np.ones(stop - start, dtype=np.bool_)
        return self._documents.read(document, start, stop), counted


def join(pieces: Sequence[PlacedPiece], num_tokens: int) -> Row:
    """Read pieces into a row of ``num_tokens`` tokens, end to end, each padded; sources may differ."""
    tokens, labels = (np.zeros(num_tokens, dtype=np.int64) for _ in range(2))
    mask, at = np.zeros(num_tokens, dtype=np.bool_), 0
    for held in pieces:
        # One token more than the piece if its document continues: the last label.
        words, counted = held.source.read(held.piece)
        tokens[at : at + held.length] = words[: held.length]
        labels[at : at + len(words) - 1] = words[1:]
        mask[at : at + len(words) - 1] = counted[1:]
        at += held.padded
    padding = (num_tokens - at,) if at < num_tokens else ()
    documents = (*(held.padded for held in pieces), *padding)
    return Row(tokens=tokens, labels=labels, mask=mask, documents=documents)
