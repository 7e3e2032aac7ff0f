"""Pairs of a chosen and a rejected answer: each is one piece of a packed row, so no pair is torn apart.

A preference dataset has the two as documents that follow each other. An answer of more than half a row loses
its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from raymega.data.packing import Documents, Ints, Keep, PackedSource, no_keep
from raymega.data.rows import Row

ANSWERS = 2
"""Documents of a pair: the chosen answer, then the rejected one."""


class PairDocuments:
    """Pairs of a preference dataset as documents: two answers end to end, each padded.

    Attributes:
        lengths: Number of tokens of each pair, padding included, [N].
        shards: Number of pairs and of bytes of each shard.
        is_truncated: True: an answer's end is left out, not cut off into a piece of its own.
    """

    is_truncated = True

    def __init__(self, documents: Documents, *, seq_len: int, multiple: int) -> None:
        """Cut answers to half a row of ``seq_len`` tokens, and pad them to a multiple of ``multiple``."""
        self._documents, self.seq_len = documents, seq_len
        # cut each answer to half a row, and pad both for themselves
        longest = seq_len // ANSWERS // multiple * multiple
        whole = np.asarray(documents.lengths).astype(np.int64)
        self.cut = np.minimum(whole[: len(whole) // ANSWERS * ANSWERS], longest).reshape(
            -1, ANSWERS
        )
        self.padded = -(-self.cut // multiple) * multiple
        self.lengths = self.padded.sum(1)
        self.shards = tuple((count // ANSWERS, size) for count, size in documents.shards)

    def need(self, shards: Sequence[int]) -> None:
        """Take the shards that are read next."""
        self._documents.need(shards)

    def read(self, pair: int, start: int, stop: int) -> Ints:
        """Return tokens [start, stop) of a pair; padding is 0."""
        tokens = np.zeros(self.lengths[pair], dtype=np.int64)
        for answer, (at, length) in enumerate(self.places(pair)):
            tokens[at : at + length] = self._documents.read(ANSWERS * pair + answer, 0, length)
        return tokens[start:stop]

    def counted(self, pair: int, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return which of tokens [start, stop) of a pair count as labels: no padding, no first token of an answer."""
        counts = np.zeros(self.lengths[pair], dtype=np.bool_)
        for answer, (at, length) in enumerate(self.places(pair)):
            found = self._documents.counted(ANSWERS * pair + answer, 0, length)
            counts[at : at + length] = True if found is None else found
            counts[at] = False
        return counts[start:stop]

    def places(self, pair: int) -> list[tuple[int, int]]:
        """Return the offset and length in tokens of each answer in its pair."""
        first = int(self.padded[pair, 0])
        return [(0, int(self.cut[pair, 0])), (first, int(self.cut[pair, 1]))]


class PairedSource(PackedSource):
    """Packed rows of whole pairs; the answers of a row are its first documents.

    Attributes:
        pairs: Pairs of the split.
        reference: Reference log-probability of each answer, [N, 2]; None for none.
    """

    reference: npt.NDArray[np.float64] | None = None

    def __init__(
        self,
        pairs: PairDocuments,
        *,
        window: int,
        keep: Keep = no_keep,
    ) -> None:
        """Pack pairs, ``window`` of them together.

        Args:
            pairs: Pairs of the split.
            window: Number of consecutive pairs of a shard that are packed together.
            keep: Function that returns the rows of a split's windows, as of :class:`PackedSource`.
        """
        super().__init__(pairs, seq_len=pairs.seq_len, window=window, keep=keep)
        self.pairs = pairs
        # of answers, each of which sees itself alone, and without the padding behind each
        lengths = pairs.cut.astype(np.float64)
        self.efficiency = float(lengths.sum() / (self.num_windows * self.seq_len))
        self.context = float((lengths**2).sum() / lengths.sum())

    def row(self, index: int) -> Row:
        """Read row ``index``."""
        # documents of the row are answers, not pairs; padding follows them
        row = super().row(index)
        numbers = [held.document for held in self.held(index)]
        answers = self.pairs.padded[numbers].flatten().tolist()
        padding = row.documents[len(numbers) :]
        reference = None if self.reference is None else self.reference[numbers].flatten()
        return replace(
            row,
            documents=(*answers, *padding),
            num_pairs=len(numbers),
            reference=reference,
        )
