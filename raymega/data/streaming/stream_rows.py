"""Cuts a token stream into windows, and finds its documents.

It owns the arithmetic of windows: no window lies in two shards. `raymega.data.packing` packs documents into
rows; `raymega.data.order` decides the order of windows and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raymega.data.format import ShardMeta, StreamShard
from raymega.data.images.stored import StoredImages
from raymega.data.packing import KEPT_SHARDS
from raymega.data.rows import Image, Row, ShardRows, whole_row
from raymega.errors import DataError, Fault

Labels = Callable[[int, int], npt.NDArray[Any]]
"""Function that says which of tokens [start, stop) of a split count as labels."""


class Stream(Protocol):
    """Tokens of a split, readable as one array."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens [start, stop)."""

    def document_lengths(self) -> npt.NDArray[np.integer]:
        """Return the number of tokens of each document in stream order, [N]."""

    @property
    def shards(self) -> Sequence[StreamShard | ShardMeta]:
        """Shards of the stream in order."""

    def need(self, shards: Sequence[int]) -> None:
        """Take the shards that are read next."""

    def drop_damaged(self, start: int, stop: int) -> bool:
        """Return whether a copy of tokens [start, stop) on this node was damaged, so that it comes again."""


class StreamSource:
    """Windows of a token stream: window i of a shard holds its tokens [i * S, i * S + S], both ends included."""

    def __init__(
        self, stream: Stream, *, seq_len: int, vocab_size: int, labels: Labels | None = None
    ) -> None:
        """Require a shard of more than S tokens, all below ``vocab_size``; without ``labels`` all count."""
        self._labels = labels
        self.images: StoredImages | None = None  # set by who opens a dataset with images
        # Windows overlap by one token: the last label is the first input of the next one.
        num_tokens = np.array([shard.num_tokens for shard in stream.shards], dtype=np.int64)
        rows = np.maximum(num_tokens - 1, 0) // seq_len
        num_bytes = np.array([shard.num_bytes for shard in stream.shards], dtype=np.int64)
        self.shards = ShardRows(rows=rows, num_bytes=num_bytes)
        self._row_ends, self._starts = np.cumsum(rows), np.cumsum(num_tokens) - num_tokens
        self.num_windows = int(rows.sum())
        self.context, self.efficiency = float(seq_len), 1.0
        self._stream, self.seq_len, self._vocab_size = stream, seq_len, vocab_size

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of window ``index``: [S + 1].

        Raises:
            DataError: A token is outside the vocabulary, so the shard is damaged. Without this
                check, vocabulary-parallel embeddings would take it for a token of another rank.
        """
        start = self._start(index)
        return _read_known(self._stream, start, start + self.seq_len + 1, self._vocab_size)

    def images_in(self, index: int) -> tuple[Image, ...]:
        """Return the images of window ``index``; reads no tokens and no pixels."""
        start = self._start(index)
        return () if self.images is None else self.images.held(start, start + self.seq_len).images

    def row(self, index: int) -> Row:
        """Return window ``index`` as a sample."""
        row, start = whole_row(self.window(index)), self._start(index)
        if self.images is not None:
            held = self.images.held(start, start + self.seq_len)
            row = replace(row, images=held.images, image_places=held.places)
        if self._labels is None:
            return row
        return replace(row, mask=self._labels(start + 1, start + self.seq_len + 1))

    def need(self, shards: Sequence[int]) -> None:
        """Take the shards that are read next."""
        self._stream.need(shards)

    def _start(self, index: int) -> int:
        """Return the position in the stream of a window's first token."""
        shard = int(np.searchsorted(self._row_ends, index, side="right"))
        inside = index - int(self._row_ends[shard]) + int(self.shards.rows[shard])
        return int(self._starts[shard]) + inside * self.seq_len


class StreamDocuments:
    """Documents of a token stream, by number."""

    def __init__(
        self,
        stream: Stream,
        lengths: npt.NDArray[np.integer],
        *,
        vocab_size: int,
        labels: Labels | None = None,
    ) -> None:
        """Require the tokens of each document, [N], and tokens below ``vocab_size``."""
        self._labels, self.is_truncated = labels, labels is not None
        self.lengths, self._stream, self._vocab_size = lengths, stream, vocab_size
        self.shards = [(shard.num_documents, shard.num_bytes) for shard in stream.shards]
        # first document and first token of each shard
        self._borders = np.cumsum([0, *(shard.num_documents for shard in stream.shards)])
        self._first = np.cumsum([0, *(shard.num_tokens for shard in stream.shards)])
        self._starts = lru_cache(KEPT_SHARDS)(self._shard_starts)

    def need(self, shards: Sequence[int]) -> None:
        """Take the shards that are read next."""
        self._stream.need(shards)

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens [start, stop) of one document.

        Raises:
            DataError: A token is outside the vocabulary.
        """
        first = self.start(document)
        return _read_known(self._stream, first + start, first + stop, self._vocab_size)

    def counted(self, document: int, start: int, stop: int) -> npt.NDArray[Any] | None:
        """Return which of tokens [start, stop) of one document count as labels; None if all do."""
        first = self.start(document)
        return self._labels and self._labels(first + start, first + stop)

    def start(self, document: int) -> int:
        """Return the position in the stream of a document's first token."""
        shard = int(np.searchsorted(self._borders, document, side="right")) - 1
        return int(self._starts(shard)[document - self._borders[shard]])

    def _shard_starts(self, shard: int) -> npt.NDArray[np.int64]:
        """Return the position in the stream of the first token of a shard's documents."""
        lengths = self.lengths[self._borders[shard] : self._borders[shard + 1]].astype(np.int64)
        return np.cumsum(lengths) - lengths + self._first[shard]


def _read_known(stream: Stream, start: int, stop: int, vocab_size: int) -> npt.NDArray[np.int64]:
    tokens = stream.read(start, stop)
    strange = _strange(tokens, vocab_size)
    if strange and stream.drop_damaged(start, stop):
        tokens = stream.read(start, stop)
        strange = _strange(tokens, vocab_size)
    if strange:
        raise DataError(_strange_token(start, strange[0], vocab_size))
    return tokens


def _strange(tokens: npt.NDArray[np.int64], vocab_size: int) -> list[int]:
    """Return the least and the largest token, as far as they are outside the vocabulary."""
    # cheap beside the read: a pass each over S + 1 tokens; Megatron's are signed
    ends = (int(tokens.min()), int(tokens.max()))
    return [token for token in ends if not 0 <= token < vocab_size]


def _strange_token(position: int, token: int, vocab_size: int) -> Fault:
    return Fault(
        fact=f"a window at token {position} of the split holds token {token}",
        rule=f"tokens are at least 0 and below vocab_size={vocab_size}, the dataset's own or, for Megatron's files, the model's",
        remedy="run `raymega data inspect --verify` on it and prepare it again, or use the model's tokenizer",
    )
