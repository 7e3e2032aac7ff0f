"""Opens a split by its path and cuts it into windows, or packs its documents into rows.

It owns the arithmetic of windows. `raymega.data.packing` packs documents into rows;
`raymega.data.order` decides the order of windows and rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from raymega.config.data import MEGATRON, DataSection, is_synthetic
from raymega.data.arrow import TokenStream
from raymega.data.format import (
    CONTEXT,
    EARLIER_ANSWER,
    LAST_ANSWER,
    META_FILE,
    DatasetMeta,
    read_meta,
    size_faults,
)
from raymega.data.megatron import MegatronStream, is_megatron
from raymega.data.packing import Documents, PackedSource
from raymega.data.remote_dataset import local_copy
from raymega.data.rows import Row, Source, whole_row
from raymega.data.synthetic import SyntheticDocuments, SyntheticSource, seed_of
from raymega.errors import DataError, Fault, raise_faults

LossOn = Literal["auto", "assistant", "completion", "all"]
LEAST_TARGET: dict[LossOn, int] = {
    "auto": EARLIER_ANSWER, "assistant": EARLIER_ANSWER, "completion": LAST_ANSWER, "all": CONTEXT,
}  # fmt: skip
Labels = Callable[[int, int], npt.NDArray[np.bool_]]
"""Function that says which of tokens [start, stop) of a split count as labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Rules by which a split is cut into samples.

    Attributes:
        seq_len: Number of tokens of a sample (S).
        packing: ``best_fit`` packs whole documents into rows, ``none`` cuts the token stream.
        window: Number of consecutive pieces of documents that are packed together.
        multiple: Multiple to which each piece's tokens are padded in a row.
        loss_on: Labels that count, as ``data.loss_on``.
    """

    seq_len: int
    packing: Literal["none", "best_fit"] = "none"
    window: int = 1
    multiple: int = 1
    loss_on: LossOn = "auto"


def shape_of(section: DataSection) -> Shape:
    """Return the shape that a job's data section sets."""
    return Shape(
        seq_len=section.seq_len,
        packing=section.packing,
        window=section.packing_window,
        multiple=section.document_multiple,
        loss_on=section.loss_on,
    )


class Stream(Protocol):
    """Tokens of a split, readable as one array."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens [start, stop)."""

    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document in stream order, [N]."""


class StreamSource:
    """Windows of a token stream: window i holds tokens [i * S, i * S + S], both ends included."""

    def __init__(
        self, stream: Stream, *, seq_len: int, vocab_size: int, labels: Labels | None = None
    ) -> None:
        """Require a stream of more than S tokens, all below ``vocab_size``; without ``labels`` all count."""
        self._labels = labels
        # Windows overlap by one token: the last label is the first input of the next one.
        self.num_windows = (stream.num_tokens - 1) // seq_len
        self.context, self.efficiency = float(seq_len), 1.0
        self._stream, self.seq_len, self._vocab_size = stream, seq_len, vocab_size

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of window ``index``: [S + 1].

        Raises:
            DataError: A token is outside the vocabulary, so the shard is damaged. Without this
                check, vocabulary-parallel embeddings would take it for a token of another rank.
        """
        start = index * self.seq_len
        return _read_known(self._stream, start, start + self.seq_len + 1, self._vocab_size)

    def row(self, index: int) -> Row:
        """Return window ``index`` as a sample."""
        row, start = whole_row(self.window(index)), index * self.seq_len
        if self._labels is None:
            return row
        return replace(row, mask=self._labels(start + 1, start + self.seq_len + 1))


class StreamDocuments:
    """Documents of a token stream, by number."""

    def __init__(self, stream: Stream, *, vocab_size: int, labels: Labels | None = None) -> None:
        """Require shards that hold document lengths, and tokens below ``vocab_size``."""
        self._labels, self.is_truncated = labels, labels is not None
        self.lengths = stream.document_lengths()
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._stream, self._vocab_size = stream, vocab_size

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens [start, stop) of one document.

        Raises:
            DataError: A token is outside the vocabulary.
        """
        first = int(self._starts[document])
        return _read_known(self._stream, first + start, first + stop, self._vocab_size)

    def counted(self, document: int, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Return which of tokens [start, stop) of one document count as labels; None if all do."""
        first = int(self._starts[document])
        return self._labels and self._labels(first + start, first + stop)


def open_split(
    path: str, split: str, shape: Shape, *, seed: int, vocab_size: int = 1 << 31
) -> Source:
    """Open one split; file sizes are checked, token data is not read yet.

    A dataset in an object store is first copied to this node as a whole; see
    `raymega.data.remote_dataset`.

    Args:
        path: Path of a dataset, as ``data.path``.
        split: Name of the split, ``train`` or ``valid``.
        shape: Rules by which the split is cut into samples.
        seed: Seed of the run's random numbers; only synthetic tokens depend on it.
        vocab_size: Tokens of the model's vocabulary, for Megatron's files, which do not tell theirs.

    Raises:
        ConfigError: There is no dataset at the path.
        DataError: The dataset is damaged, lacks the split, is shorter than one window, or has no
            document lengths for packing.
        StorageError: The dataset's store cannot be reached, or the copy cannot be written.
    """
    is_packed, seq_len = shape.packing != "none", shape.seq_len
    if is_synthetic(path):
        own = seed_of(path, seed)
        if is_packed:
            documents = SyntheticDocuments(
                split=split, seq_len=seq_len, seed=own, loss_on=shape.loss_on
            )
            return packed(documents, shape)
        return SyntheticSource(split=split, seq_len=seq_len, seed=own, loss_on=shape.loss_on)
    if is_megatron(path):
        if split != "train":
            raise DataError(missing_split(path, split))
        stream: Stream = MegatronStream(path.removeprefix(MEGATRON))
        labels = None
    else:
        # A prepared dataset: check it as far as possible without reading tokens.
        folder = local_copy(path)
        meta = read_meta(folder)
        raise_faults(DataError, size_faults(folder, meta))
        if split not in meta.splits:
            raise DataError(missing_split(path, split))
        if is_packed and not meta.has_documents:
            raise DataError(no_documents(path))
        stream, vocab_size = TokenStream(folder, meta.splits[split]), meta.vocab_size
        labels = labels_of(stream, meta, shape.loss_on)
    if is_packed:
        return packed(StreamDocuments(stream, vocab_size=vocab_size, labels=labels), shape)
    if stream.num_tokens <= seq_len:
        raise DataError(short_split(path, split, stream.num_tokens, seq_len))
    return StreamSource(stream, seq_len=seq_len, vocab_size=vocab_size, labels=labels)


def labels_of(stream: TokenStream, meta: DatasetMeta, loss_on: LossOn) -> Labels | None:
    """Return the function that says which tokens of a dataset's split count as labels; None if all do.

    All but the tokens of a conversation's answers are counted out unless ``loss_on`` is ``all``.
    """
    if not meta.has_targets:
        return None
    least = LEAST_TARGET[loss_on]
    return lambda start, stop: stream.read_targets(start, stop) >= least


def packed(documents: Documents, shape: Shape) -> PackedSource:
    """Pack ``documents`` into rows of ``shape``."""
    return PackedSource(
        documents, seq_len=shape.seq_len, window=shape.window, multiple=shape.multiple
    )


def _read_known(stream: Stream, start: int, stop: int, vocab_size: int) -> npt.NDArray[np.int64]:
    tokens = stream.read(start, stop)
    # cheap beside the read: one pass over S + 1 tokens
    if int(tokens.max()) >= vocab_size:
        raise DataError(_strange_token(start, int(tokens.max()), vocab_size))
    return tokens


def _strange_token(position: int, token: int, vocab_size: int) -> Fault:
    return Fault(
        fact=f"a window at token {position} of the split holds token {token}",
        rule=f"tokens are below vocab_size={vocab_size}, the dataset's own or, for Megatron's files, the model's",
        remedy="run `raymega data inspect --verify` on it and prepare it again, or use the model's tokenizer",
    )


def no_documents(path: str, *, field: str = "data.path") -> Fault:
    """Return the fault of a dataset whose shards do not hold the lengths of their documents."""
    return Fault(
        fact=f"{field}={path!r} was prepared without the boundaries of documents",
        rule=f"data.packing=best_fit needs them: {META_FILE} of version 2",
        remedy="run `raymega data prepare` again into a new folder, or set data.packing=none",
    )


def missing_split(path: str, split: str) -> Fault:
    """Return the fault of a dataset that has no such split."""
    if is_megatron(path):
        return Fault(
            fact=f"{path} has no {split} split",
            rule="Megatron's files are one split, train, and the job evaluates on held-out text",
            remedy="set data.validation=[{name: held-out, path: megatron:OTHER, split: train}], or "
            "run.eval_samples=0",
        )
    return Fault(
        fact=f"{path} has no {split} split",
        rule="it was prepared with --valid-fraction 0",
        remedy="set run.eval_samples=0 to train without evaluation, or prepare it again with "
        "--valid-fraction 0.02",
    )


def short_split(path: str, split: str, num_tokens: int, seq_len: int) -> Fault:
    """Return the fault of a split that is shorter than one window."""
    return Fault(
        fact=f"the {split} split of {path} has {num_tokens} tokens",
        rule=f"a window of data.seq_len={seq_len} takes {seq_len + 1}",
        remedy="prepare more text, or set a smaller data.seq_len",
    )
