"""Packs whole documents into rows of S tokens: best fit, longest first, in windows of the stream.

Which documents share a row follows from their lengths alone, so it is the same on every grid and in
every epoch; which row comes when is data.order's. Nothing is read until a row is asked for.
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
        """Tokens of each, [N], at least 1."""

    def read(self, document: int, start: int, stop: int) -> Ints:
        """Tokens [start, stop) of one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Documents, those longer than S cut after every S tokens.

    Attributes:
        document: Which document each piece is of, [P].
        start: Where it begins in the document, [P].
        length: Its tokens, at most S, [P].
    """

    document: Ints
    start: Ints
    length: Ints


def cut_documents(lengths: Ints, seq_len: int) -> Pieces:
    """Pieces in the order of the stream."""
    counts = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(len(document), dtype=np.int64) - first) * seq_len
    return Pieces(
        document=document, start=start, length=np.minimum(lengths[document] - start, seq_len)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Which pieces each row holds.

    Attributes:
        order: Pieces, row after row, [P].
        ends: Where each row ends in ``order``, [R].
    """

    order: Ints
    ends: Ints

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.ends)

    def pieces(self, row: int) -> Ints:
        """The pieces of a row, in the order of the stream."""
        return self.order[self.ends[row - 1] if row else 0 : self.ends[row]]


def pack(lengths: Ints, seq_len: int, *, window: int) -> Packing:
    """Best fit decreasing, each ``window`` pieces for themselves.

    Args:
        lengths: Tokens of each piece, at most ``seq_len``.
        seq_len: S.
        window: Pieces that are packed together. More of them leave less padding.
    """
    rows: list[list[int]] = []
    for first in range(0, len(lengths), window):
        rows += _best_fit(lengths[first : first + window].tolist(), seq_len, first)
    order = np.array([piece for row in rows for piece in row], dtype=np.int64)
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return Packing(order=order, ends=ends)


def _best_fit(lengths: list[int], seq_len: int, first: int) -> Iterator[list[int]]:
    """Rows of one window; a piece goes where it leaves least room, ties to the oldest row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[index], 0))
        free, row = room.pop(at) if at < len(room) else (seq_len, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(first + index)
        if free > lengths[index]:
            insort(room, (free - lengths[index], row))
    return map(sorted, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPiece:
    """A piece as a row holds it.

    Attributes:
        piece: Its number.
        start: Where it begins in the row.
        length: Its tokens.
        padded: The same with its padding.
    """

    piece: int
    start: int
    length: int
    padded: int


class PackedSource:
    """Rows of S tokens: whole documents end to end, then padding.

    The label of a piece's last token is the document's next token where the document goes on in
    another piece, and does not count where it ends there. So every token but each document's first
    is predicted once in an epoch. Padding counts nowhere: what makes a piece a multiple of
    ``multiple`` long lies behind it, where none of its tokens sees it, and what is left of a row is
    one more document.
    """

    def __init__(
        self, documents: Documents, *, seq_len: int, window: int, multiple: int = 1
    ) -> None:
        """``multiple`` must divide ``seq_len``."""
        self._documents, self.seq_len = documents, seq_len
        self._pieces = cut_documents(documents.lengths, seq_len)
        self._padded = -(-self._pieces.length // multiple) * multiple
        self._packing = pack(self._padded, seq_len, window=window)
        self.num_windows = self._packing.num_rows
        length = self._pieces.length.astype(np.float64)
        self.efficiency = float(length.sum() / (self.num_windows * seq_len))
        self.context = float((length**2).sum() / length.sum())

    def row(self, index: int) -> Row:
        """Read a row."""
        return self.join(self.held(index), self.seq_len)

    def held(self, index: int) -> list[PlacedPiece]:
        """The pieces of a row; reads nothing."""
        pieces = self._packing.pieces(index)
        ends = np.cumsum(self._padded[pieces])
        return [
            PlacedPiece(
                piece=int(piece),
                start=int(end - self._padded[piece]),
                length=int(self._pieces.length[piece]),
                padded=int(self._padded[piece]),
            )
            for piece, end in zip(pieces, ends, strict=True)
        ]

    def join(self, pieces: Sequence[PlacedPiece], num_tokens: int) -> Row:
        """Read pieces into a row of ``num_tokens``, end to end, each padded."""
        tokens, labels = (np.zeros(num_tokens, dtype=np.int64) for _ in range(2))
        mask, at = np.zeros(num_tokens, dtype=np.bool_), 0
        for held in pieces:
            words = self._read(held.piece)
            tokens[at : at + held.length] = words[: held.length]
            labels[at : at + len(words) - 1] = words[1:]
            mask[at : at + len(words) - 1] = True
            at += held.padded
        padding = (num_tokens - at,) if at < num_tokens else ()
        documents = (*(held.padded for held in pieces), *padding)
        return Row(tokens=tokens, labels=labels, mask=mask, documents=documents)

    def _read(self, piece: int) -> Ints:
        """A piece and, unless its document ends with it, the token after it."""
        pieces = self._pieces
        document, start = int(pieces.document[piece]), int(pieces.start[piece])
        whole = int(self._documents.lengths[document])
        stop = min(start + int(pieces.length[piece]) + 1, whole)
        return self._documents.read(document, start, stop)
