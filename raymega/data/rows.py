"""Rows: the samples of a run, each S tokens with labels and the lengths of their documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Sample of S tokens.

    Attributes:
        tokens: Input tokens, [S] int64.
        labels: Token after each token, [S] int64; 0 where the mask is False.
        mask: True where the label counts in the loss, [S] bool.
        documents: Lengths of the row's documents, end to end; they add up to S. Tokens of different
            documents do not attend to each other. A row that is not packed is one document.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    documents: tuple[int, ...]


class Source(Protocol):
    """Rows of a split."""

    @property
    def num_windows(self) -> int:
        """Number of rows; an epoch visits each once."""

    @property
    def seq_len(self) -> int:
        """Number of tokens of a row (S)."""

    @property
    def context(self) -> float:
        """Mean over tokens of the length of their document piece; S without packing."""

    @property
    def efficiency(self) -> float:
        """Share of all rows' tokens that are not padding."""

    def row(self, index: int) -> Row:
        """Return row ``index``; called a few times per step, may read from disk."""


class NumberedRows(Protocol):
    """Rows by number, as a loader reads them: those of a run by global sample, those of an evaluation."""

    @property
    def seq_len(self) -> int:
        """Number of tokens of a row (S)."""

    def row(self, number: int, /) -> Row:
        """Return row ``number``."""


def whole_row(window: npt.NDArray[np.int64]) -> Row:
    """Return the row of a window [S + 1]: S input tokens, and as labels the same shifted by one."""
    return Row(
        tokens=window[:-1],
        labels=window[1:],
        mask=np.ones(len(window) - 1, dtype=np.bool_),
        documents=(len(window) - 1,),
    )


def positions_of(documents: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return the position of each token of a row in its document, [S]."""
    return np.concatenate([np.arange(length, dtype=np.int64) for length in documents])


def later_of(row: Row, depth: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return labels and masks further ahead, [depth, S] each: at index k - 1, of k tokens further.

    The mask is True where all labels up to this one count and are in the token's document.
    """
    is_end = np.zeros(len(row.tokens), dtype=np.bool_)
    is_end[np.cumsum(row.documents) - 1] = True
    # Each depth is the one before, shifted by one token, and masked at document ends.
    labels, masks = [row.labels], [row.mask]
    for _ in range(depth):
        labels.append(np.roll(labels[-1], -1))
        masks.append(row.mask & ~is_end & np.roll(masks[-1], -1))
    shape = (depth, len(row.tokens))
    return np.reshape(labels[1:], shape), np.reshape(masks[1:], shape)


def empty_row(seq_len: int) -> Row:
    """Return the row of a slot without a sample: all its labels are masked."""
    zeros = np.zeros(seq_len, dtype=np.int64)
    return Row(
        tokens=zeros, labels=zeros, mask=np.zeros(seq_len, dtype=np.bool_), documents=(seq_len,)
    )
