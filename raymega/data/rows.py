"""Row: S tokens as one sample of a run holds them, and what tells its documents apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One sample.

    Attributes:
        tokens: [S] int64.
        labels: [S] int64, the token after each token; 0 where the mask is 0.
        mask: [S] bool, whether the label counts.
        documents: Lengths of what the row holds, end to end; they add up to S. Tokens of different
            ones do not see each other. A row that is not packed is one document.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    documents: tuple[int, ...]


class Source(Protocol):
    """The rows of a split."""

    @property
    def num_windows(self) -> int:
        """How many there are; an epoch visits each once."""

    @property
    def seq_len(self) -> int:
        """S."""

    @property
    def context(self) -> float:
        """Mean over tokens of the length of what they stand in: S where nothing is packed."""

    @property
    def efficiency(self) -> float:
        """Share of all rows' tokens that are no padding."""

    def row(self, index: int) -> Row:
        """One of them; called a few times a step, may read from disk."""


def whole_row(window: npt.NDArray[np.int64]) -> Row:
    """The row of a window [S + 1]: S tokens to read, and the same moved on by one to predict."""
    return Row(
        tokens=window[:-1],
        labels=window[1:],
        mask=np.ones(len(window) - 1, dtype=np.bool_),
        documents=(len(window) - 1,),
    )


def positions_of(documents: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """[S]: the place of each token of a row in its document."""
    return np.concatenate([np.arange(length, dtype=np.int64) for length in documents])


def later_of(row: Row, depth: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Labels and masks further ahead, [depth, S] each: at place k - 1 those of k tokens more.

    One counts where every label from the token's own on counts and stands in the token's document.
    """
    is_end = np.zeros(len(row.tokens), dtype=np.bool_)
    is_end[np.cumsum(row.documents) - 1] = True
    labels, masks = [row.labels], [row.mask]
    for _ in range(depth):
        labels.append(np.roll(labels[-1], -1))
        masks.append(row.mask & ~is_end & np.roll(masks[-1], -1))
    shape = (depth, len(row.tokens))
    return np.reshape(labels[1:], shape), np.reshape(masks[1:], shape)


def empty_row(seq_len: int) -> Row:
    """The row of a slot without a sample: nothing in it counts."""
    zeros = np.zeros(seq_len, dtype=np.int64)
    return Row(
        tokens=zeros, labels=zeros, mask=np.zeros(seq_len, dtype=np.bool_), documents=(seq_len,)
    )
