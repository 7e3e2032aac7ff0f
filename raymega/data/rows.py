"""Rows: the samples of a run, each S tokens with labels and the lengths of their documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from raymega.config.vision.sizes import Grid

Ints = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]
"""Pixels of an image, [3, height, width]."""
TEXT = -1
"""Feature of a token that stands for no patch of an image."""


class Image(NamedTuple):
    """Image of a row.

    Attributes:
        make: Function that makes its pixels; a loader calls it for the images of its own rank.
        grid: Rows and columns of its tokens.
    """

    make: Callable[[], Pixels]
    grid: Grid

    def __call__(self) -> Pixels:
        """Return the pixels."""
        return self.make()

    @property
    def num_patches(self) -> int:
        """Number of tokens that stand for it."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Sample of S tokens.

    Attributes:
        tokens: Input tokens, [S] int64.
        labels: Token after each token, or the token itself in a row with masks, [S] int64; any number
            where the mask is False.
        mask: True where the label counts in the loss, [S] bool.
        documents: Lengths of the row's documents, end to end; they add up to S. Tokens of different
            documents do not attend to each other. A row that is not packed is one document.
        token_types: Segment of each token, [S] int64, in a row with masks; else None.
        segment_pairs: Class of the pair of segments that begins at each token, [S] int64, -1 where none does.
        num_pairs: Number of pairs of a chosen and a rejected answer, or of other groups of documents: they are
            the first documents, the chosen one of each pair first. 0 in a row of texts.
        stream_documents: Document of each token, [S] int64, -1 of padding, in a row of an encoder-decoder model; its
            ``documents`` are the tokens of the encoder and those of the decoder. Else None.
        stream_positions: Position of each token in its document's part of its stream, [S] int64; likewise.
        reference: Reference log-probability of each answer, [2 * num_pairs] float64; None where none is stored.
        lengths: Number of tokens of each document of the groups, without its padding.
        classes: Class or right choice of each group, [num_pairs] int64, or its value, float64; None where documents
            have none.
        taught: A teacher's likeliest next tokens of each token, and their logits, [S, k] each; None where none are stored.
        images: Images of the row.
        image_places: Feature of each token, [S] int64: number of the image in ``images`` times P, plus that of the
            patch, which are at most P, row after row; -1 of text. None where the model reads no images.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    documents: tuple[int, ...]
    token_types: Ints | None = None
    segment_pairs: Ints | None = None
    stream_documents: Ints | None = None
    stream_positions: Ints | None = None
    num_pairs: int = 0
    reference: npt.NDArray[np.float64] | None = None
    lengths: tuple[int, ...] = ()
    classes: Ints | None = None
    taught: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None = None
    images: tuple[Image, ...] = ()
    image_places: Ints | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRows:
    """Shards of a split: rows are numbered through them, and none lies in two.

    Attributes:
        rows: Number of rows of each shard, [N].
        num_bytes: Size of each shard in bytes, [N].
    """

    rows: Ints
    num_bytes: Ints


def one_shard(num_rows: int) -> ShardRows:
    """Return the shard of rows that no file holds."""
    return ShardRows(rows=np.array([num_rows]), num_bytes=np.zeros(1, dtype=np.int64))


class Source(Protocol):
    """Rows of a split."""

    @property
    def shards(self) -> ShardRows:
        """Rows and bytes of each shard."""

    def need(self, shards: Sequence[int]) -> None:
        """Take the shards that are read next, the first one first; a node may fetch them meanwhile."""

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


LossOn = Literal["auto", "assistant", "completion", "all"]
Pairs = Literal["none", "alone", "base", "stored"]


class RowForm(NamedTuple):
    """Form of the documents that a job reads.

    Attributes:
        kind: ``texts``; ``pairs`` of answers; ``answers`` with a boolean label, each before one of another prompt;
            documents with ``classes`` or ``values``; ``choices`` of a question; ``tokens`` with classes; ``matches``,
            two texts that belong together.
        size: Number of documents that belong together, and stay in one row; 0 for texts, which may be cut.
        num_classes: Classes of a document or token; 0 without.
        is_causal: Whether padding behind a document is seen by none of its tokens.
    """

    kind: Literal["texts", "pairs", "answers", "classes", "values", "choices", "tokens", "matches"]
    size: int = 0
    num_classes: int = 0
    is_causal: bool = True

    @property
    def has_labels(self) -> bool:
        """True where the dataset holds labels beside the tokens that count."""
        return self.kind not in ("texts", "pairs")


TEXTS, PAIRS, ANSWERS = RowForm("texts"), RowForm("pairs", 2), RowForm("answers", 2)
VALUE_BYTES = 4
"""Tokens at whose side a document's number lies: the bytes of a float32."""
UNDESIRABLE = 4
"""Bit beside the tokens of an undesirable answer; the lower bits say which tokens the assistant wrote."""


def choice_target(num_choices: int, *, is_right: bool) -> int:
    """Return the byte beside the tokens of a question's choice."""
    return 2 * num_choices + is_right


def value_targets(value: float, num_tokens: int) -> npt.NDArray[np.uint8]:
    """Return the bytes beside the tokens of a document with a number, [num_tokens].

    They are those of its float32, the most significant one first, again and again: so a document of two or three
    tokens has the leading digits, and one that is cut has all.
    """
    return np.resize(np.array([value], dtype=">f4").view(np.uint8), num_tokens)


def value_of(targets: npt.NDArray[np.integer]) -> float:
    """Return the number that the bytes beside a document's tokens hold."""
    held = np.zeros(VALUE_BYTES, dtype=np.uint8)
    held[: len(targets)] = targets[:VALUE_BYTES]
    return float(held.view(">f4")[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Rules by which a split is cut into samples.

    Attributes:
        seq_len: Number of tokens of a sample (S).
        packing: ``best_fit`` packs whole documents into rows, ``none`` cuts the token stream.
        window: Number of consecutive pieces of documents that are packed together.
        multiple: Multiple to which each piece's tokens are padded in a row.
        loss_on: Labels that count, as ``data.loss_on``.
        pairs: Use of a preference dataset: ``none`` for one of texts, else as ``preference.reference``, or
            ``alone`` where the loss asks no reference.
        form: Form of the documents.
    """

    seq_len: int
    packing: Literal["none", "best_fit"] = "none"
    window: int = 1
    multiple: int = 1
    loss_on: LossOn = "auto"
    pairs: Pairs = "none"
    form: RowForm = TEXTS

    @property
    def grouped(self) -> RowForm:
        """Form of the documents, that of pairs where only their use is given."""
        return PAIRS if self.form.kind == "texts" and self.pairs != "none" else self.form

    @property
    def counted_on(self) -> LossOn:
        """Labels that count; of a pair what the answers alone have, the last message."""
        return "completion" if self.loss_on == "auto" and self.pairs != "none" else self.loss_on


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSetup:
    """Arguments of a data source's code.

    Attributes:
        path: Path that names the source, ``NAME`` or ``NAME:...``.
        split: Name of the split, ``train`` or ``valid``.
        shape: Rules by which the split is cut into samples.
        seed: Seed of the run's random numbers.
        vocab_size: Tokens of the vocabulary.
    """

    path: str
    split: str
    shape: Shape
    seed: int
    vocab_size: int


class WindowSource:
    """Source of rows that a function makes: its windows [S + 1] of tokens by number, whose every label counts."""

    def __init__(
        self, window: Callable[[int], npt.NDArray[np.int64]], *, num_windows: int, seq_len: int
    ) -> None:
        """Take the function, which must return the same window for the same number."""
        self._window, self.num_windows, self.seq_len = window, num_windows, seq_len
        self.context, self.efficiency = float(seq_len), 1.0
        self.shards = one_shard(num_windows)

    def need(self, shards: Sequence[int]) -> None:
        """Do nothing: there is no shard to fetch."""

    def row(self, index: int) -> Row:
        """Return window ``index`` as a sample."""
        return whole_row(self._window(index))


class DocumentSource:
    """Documents that a function makes, for rows that raymega packs; each token is a label, but a document's first."""

    is_truncated = False

    def __init__(
        self, read: Callable[[int], npt.NDArray[np.int64]], lengths: npt.NDArray[np.integer]
    ) -> None:
        """Take the function from a document's number to its tokens, and the number of tokens of each, [N]."""
        self._read, self.lengths = read, lengths
        self.shards = ((len(lengths), 0),)

    def need(self, shards: Sequence[int]) -> None:
        """Do nothing: there is no shard to fetch."""

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens [start, stop) of one document."""
        return self._read(document)[start:stop]

    def counted(self, document: int, start: int, stop: int) -> None:
        """Return that all tokens count as labels."""


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
