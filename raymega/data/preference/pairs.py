"""Pairs of a chosen and a rejected answer: each is one piece of a packed row, so no pair is torn apart.

A preference dataset has the two as documents that follow each other. An answer of more than half a row loses
its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from raymega.data.packing import Documents, Ints, Keep, PackedSource, no_keep
from raymega.data.rows import UNDESIRABLE, Row

ANSWERS = 2
"""Documents of a pair: the chosen answer, then the rejected one."""


class PairDocuments:
    """Pairs of a preference dataset as documents: two answers end to end, each padded. Other groups have other sizes.

    Attributes:
        lengths: Number of tokens of each pair, padding included, [N].
        shards: Number of pairs and of bytes of each shard.
        is_truncated: True: an answer's end is left out, not cut off into a piece of its own.
    """

    is_truncated = True

    def __init__(
        self,
        documents: Documents,
        *,
        seq_len: int,
        multiple: int,
        size: int = ANSWERS,
        is_causal: bool = True,
        least: int = -1,
    ) -> None:
        """Cut answers to their share of a row of ``seq_len`` tokens, and pad them to a multiple of ``multiple``.

        Args:
            documents: Answers, each group's one after another.
            seq_len: Number of tokens of a row (S).
            multiple: Multiple to which each answer is padded.
            size: Number of answers of a group.
            is_causal: False where an answer's tokens see padding behind it: then it ends at the last multiple
                that it fills.
            least: Least kind of a token that counts, of answers with labels; -1 of others.
        """
        self._documents, self.seq_len, self.size = documents, seq_len, size
        self._least = least
        # cut each answer to its share of a row, and pad all for themselves
        longest = seq_len // size // multiple * multiple
        whole = np.asarray(documents.lengths).astype(np.int64)
        self.cut = np.minimum(whole[: len(whole) // size * size], longest).reshape(-1, size)
        if not is_causal:
            full = self.cut // multiple * multiple
            self.cut = np.where(full > 0, full, self.cut)
        self.padded = -(-self.cut // multiple) * multiple
        self.lengths = self.padded.sum(1)
        # a group whose documents lie in two shards belongs to the second one
        ends = list(accumulate((count for count, _ in documents.shards), initial=0))
        self.shards = tuple(
            (end // size - start // size, num_bytes)
            for (start, end), (_, num_bytes) in zip(pairwise(ends), documents.shards, strict=True)
        )

    def need(self, shards: Sequence[int]) -> None:
        """Take the shards that are read next."""
        self._documents.need(shards)

    def read(self, pair: int, start: int, stop: int) -> Ints:
        """Return tokens [start, stop) of a pair; padding is 0."""
        tokens = np.zeros(self.lengths[pair], dtype=np.int64)
        for answer, (at, length) in enumerate(self.places(pair)):
            tokens[at : at + length] = self._documents.read(self.size * pair + answer, 0, length)
        return tokens[start:stop]

    def counted(self, pair: int, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return which of tokens [start, stop) of a pair count as labels: no padding, no first token of an answer."""
        counts = np.zeros(self.lengths[pair], dtype=np.bool_)
        for answer, (at, length) in enumerate(self.places(pair)):
            found = self._documents.counted(self.size * pair + answer, 0, length)
            if found is not None and self._least >= 0:
                found = np.asarray(found) % UNDESIRABLE >= self._least
            counts[at : at + length] = True if found is None else found
            counts[at] = False
        return counts[start:stop]

    def targets(self, pair: int, *, least: int = 0) -> list[Ints]:
        """Return what the dataset holds beside each token of each answer, [length] each; 1 where it holds nothing.

        Args:
            pair: Number of the pair.
            least: Tokens of each answer that are read even where it was cut to fewer.
        """
        found = []
        for answer, kept in enumerate(self.cut[pair].tolist()):
            length = max(kept, min(least, int(self._documents.lengths[self.size * pair + answer])))
            each = self._documents.counted(self.size * pair + answer, 0, length)
            found.append(
                np.ones(length, np.int64) if each is None else np.asarray(each, dtype=np.int64)
            )
        return found

    def places(self, pair: int) -> list[tuple[int, int]]:
        """Return the offset and length in tokens of each answer in its pair."""
        padded, cut = self.padded[pair].tolist(), self.cut[pair].tolist()
        return list(zip(accumulate([0, *padded[:-1]]), cut, strict=True))


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
            lengths=tuple(self.pairs.cut[numbers].flatten().tolist()),
        )
