"""Opens a split by its path and cuts it into windows.

It owns the arithmetic of windows; which window comes when is data.order's.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from raymega.data.arrow import TokenStream
from raymega.data.format import read_meta, size_faults
from raymega.data.remote import local_copy
from raymega.data.synthetic import SYNTHETIC_PATH, SyntheticSource
from raymega.errors import DataError, Fault, raise_faults


class Source(Protocol):
    """Windows of S + 1 tokens: S to read, and the same moved on by one to predict."""

    @property
    def num_windows(self) -> int:
        """How many there are; an epoch visits each once."""

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Tokens of one window: [S + 1]; called a few times a step, may read from disk."""


class StreamSource:
    """Windows of a token stream: window i holds tokens [i * S, i * S + S], both ends included."""

    def __init__(self, stream: TokenStream, *, seq_len: int, vocab_size: int) -> None:
        """The stream must be longer than one window; its tokens are below ``vocab_size``."""
        self.num_windows = (stream.num_tokens - 1) // seq_len
        self._stream, self._seq_len, self._vocab_size = stream, seq_len, vocab_size

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Tokens of window ``index``: [S + 1].

        Raises:
            DataError: A token is outside the vocabulary: the shard is not what was written. Cut
                embeddings would take it for a token of another rank and train on.
        """
        start = index * self._seq_len
        tokens = self._stream.read(start, start + self._seq_len + 1)
        if int(tokens.max()) >= self._vocab_size:
            raise DataError(_strange_token(start, int(tokens.max()), self._vocab_size))
        return tokens


def open_split(path: str, split: str, *, seq_len: int, seed: int) -> Source:
    """Open one split; sizes of its files are checked, their content is not read yet.

    A dataset in an object store is first brought to this node, whole; see data.remote.

    Args:
        path: A prepared dataset, or ``synthetic``.
        split: ``train`` or ``valid``.
        seq_len: S.
        seed: Of the run; only synthetic tokens depend on it.

    Raises:
        ConfigError: There is no dataset at the path.
        DataError: It is torn, has no such split, or less than one window.
        StorageError: Its store cannot be reached.
    """
    if path == SYNTHETIC_PATH:
        return SyntheticSource(split=split, seq_len=seq_len, seed=seed)
    folder = local_copy(path)
    meta = read_meta(folder)
    raise_faults(DataError, size_faults(folder, meta))
    if split not in meta.splits:
        raise DataError(missing_split(path, split))
    if meta.splits[split].num_tokens <= seq_len:
        raise DataError(short_split(path, split, meta.splits[split].num_tokens, seq_len))
    stream = TokenStream(folder, meta.splits[split])
    return StreamSource(stream, seq_len=seq_len, vocab_size=meta.vocab_size)


def _strange_token(position: int, token: int, vocab_size: int) -> Fault:
    return Fault(
        fact=f"a window at token {position} of the split holds token {token}",
        rule=f"the dataset's tokens are below its vocab_size={vocab_size}",
        remedy="run `raymega data inspect --verify` on it and prepare it again",
    )


def missing_split(path: str, split: str) -> Fault:
    """The fault of a dataset that was prepared without the split."""
    return Fault(
        fact=f"{path} has no {split} split",
        rule="it was prepared with --valid-fraction 0",
        remedy="prepare it with a valid fraction above 0",
    )


def short_split(path: str, split: str, num_tokens: int, seq_len: int) -> Fault:
    """The fault of a split that holds no whole window."""
    return Fault(
        fact=f"the {split} split of {path} has {num_tokens} tokens",
        rule=f"a window of data.seq_len={seq_len} takes {seq_len + 1}",
        remedy="prepare more text, or set a smaller data.seq_len",
    )
