"""Rows of a data source of a plug-in, and transforms of rows: each is checked, and a failure names the plug-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from raymega.config.schema import Job, PluginsSection
from raymega.data.rows import DocumentSource, Row, ShardRows, Source, SourceSetup
from raymega.errors import ConfigError
from raymega.plugins import Plugin, call_plugin, find

Tokens = npt.NDArray[np.int64]
Transform = Callable[[Row, int], Row]
"""Function of a row and the number of its sample to a row of the same length."""


KEPT = (
    "num_pairs", "reference", "token_types", "segment_pairs", "lengths", "classes", "stream_documents",
    "stream_positions",
)  # fmt: skip
"""Fields of a row that a transform keeps: of pairs of answers, an encoder's segments, scored documents, and streams."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformSetup:
    """Arguments of a transform's code, which returns the function of rows: the job, and the split."""

    job: Job
    split: str


def open_named(
    name: str, setup: SourceSetup, plugins: PluginsSection | None
) -> Source | DocumentSource:
    """Return the opened data source ``name``, or the documents of a plug-in's, which are to be packed.

    Raises:
        ConfigError: The code of a plug-in failed, which the error tells with its line, or it has rows where
            documents are wanted.
    """
    row, section = find("data_source", name), plugins or PluginsSection()
    code = section.code("data_source", name)
    found = call_plugin(row, lambda: code(setup))
    if not row.is_outside:
        return cast(Source, found)
    if setup.shape.grouped.size:
        raise ConfigError(
            fact=f"data source {row.name} has texts, and the job reads {setup.shape.grouped.kind}",
            rule="answers and labels are read from a dataset of `raymega data prepare`, with their --format",
            remedy="prepare the rows, and name the dataset in data.path",
        )
    is_packed, packing = isinstance(found, DocumentSource), setup.shape.packing
    if is_packed is not (packing != "none"):
        raise ConfigError(
            fact=f"data source {row.name} returned {type(found).__name__}, and data.packing={packing}",
            rule="a raymega.data.rows.DocumentSource is packed, and all others have rows of their own",
            remedy=f"set data.packing={'best_fit' if is_packed else 'none'}, or correct {row.target}",
        )
    if is_packed:
        return _CheckedDocuments(found, row, setup.vocab_size)
    return _CheckedSource(found, row, setup)


def transforms_of(job: Job, split: str) -> list[Transform]:
    """Return the transforms of a job's rows.

    Raises:
        ConfigError: The code of a plug-in failed; the error has its line.
    """
    setup = TransformSetup(job=job, split=split)
    made = []
    for name in job.data.transforms:
        row, code = find("transform", name), job.plugins.code("transform", name)
        made.append(_checked(row, _call(row, code, setup), job))
    return made


def _call(
    row: Plugin, code: Callable[[TransformSetup], Transform], setup: TransformSetup
) -> Transform:
    return call_plugin(row, lambda: code(setup))


def _checked(row: Plugin, transform: Transform, job: Job) -> Transform:
    seq_len, vocab_size = job.data.seq_len, job.model.vocab_size

    def checked(before: Row, sample: int) -> Row:
        # the plug-in's own call, then the checks of its result
        after = call_plugin(row, lambda: transform(before, sample))
        _check(after, row, seq_len=seq_len, vocab_size=vocab_size)
        if after.documents != before.documents:
            raise _wrong(row, "changed the lengths of documents", "packing has fixed them")
        for name in KEPT:
            if not _is_alike(getattr(after, name), getattr(before, name)):
                raise _wrong(
                    row,
                    f"changed {name} of the row",
                    "dataclasses.replace(row, ...) keeps what a transform leaves alone",
                )
        return after

    return checked


class _CheckedDocuments(DocumentSource):
    """Documents of a plug-in; one of another length or with tokens beyond the vocabulary is refused."""

    def __init__(self, inner: DocumentSource, row: Plugin, vocab_size: int) -> None:
        lengths = np.asarray(inner.lengths)
        is_whole = lengths.ndim == 1 and lengths.size and lengths.dtype.kind in "iu"
        if not is_whole or not (lengths > 0).all():
            raise _wrong(
                row,
                f"has lengths {_shape(lengths)}",
                "they are [N] integers, at least 1, of one document or more",
            )
        super().__init__(lambda number: inner.read(number, 0, int(lengths[number])), lengths)
        self._row, self._vocab_size = row, vocab_size

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) of one document."""
        tokens = call_plugin(self._row, lambda: self._read(document))
        length = int(self.lengths[document])
        if not isinstance(tokens, np.ndarray) or tokens.shape != (length,):
            fact = f"has document {document} of {_shape(tokens)}"
            raise _wrong(self._row, fact, f"its length is {length}")
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            fact = f"has tokens from {tokens.min()} to {tokens.max()}"
            raise _wrong(self._row, fact, f"they are below model.vocab_size={self._vocab_size}")
        return tokens[start:stop].astype(np.int64)


class _CheckedSource:
    """Source of a plug-in; a row that is none of S tokens of the vocabulary is refused."""

    def __init__(self, inner: Source, row: Plugin, setup: SourceSetup) -> None:
        self._inner, self._row, self._setup = inner, row, setup
        self.shards: ShardRows = call_plugin(row, lambda: inner.shards)
        self.num_windows: int = call_plugin(row, lambda: inner.num_windows)
        self.seq_len, self.efficiency = setup.shape.seq_len, 1.0
        self.context = float(self.seq_len)
        if self.num_windows < 1 or self.num_windows != self.shards.rows.sum():
            raise _wrong(
                row,
                f"has num_windows={self.num_windows} and shards of {self.shards.rows.sum()} rows",
                "the two are one number, at least 1",
            )

    def need(self, shards: Sequence[int]) -> None:
        """Tell the source."""
        call_plugin(self._row, lambda: self._inner.need(shards))

    def row(self, index: int) -> Row:
        """Return row ``index``."""
        found = call_plugin(self._row, lambda: self._inner.row(index))
        _check(found, self._row, seq_len=self.seq_len, vocab_size=self._setup.vocab_size)
        return found


def _check(found: Row, row: Plugin, *, seq_len: int, vocab_size: int) -> None:
    """Refuse a row that a model cannot train on."""
    # ids: a number outside of the vocabulary would read beyond the embedding
    for name in ("tokens", "labels"):
        ids = getattr(found, name, None)
        if not isinstance(ids, np.ndarray) or ids.shape != (seq_len,) or ids.dtype != np.int64:
            raise _wrong(
                row, f"has {name} {_shape(ids)}", f"they are [{seq_len}] int64, as data.seq_len"
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise _wrong(
                row,
                f"has {name} from {ids.min()} to {ids.max()}",
                f"tokens are below model.vocab_size={vocab_size}",
            )
    # mask and documents cover the whole row
    if found.mask.shape != (seq_len,) or found.mask.dtype != np.bool_:
        raise _wrong(row, f"has a mask {_shape(found.mask)}", f"it is [{seq_len}] bool")
    if sum(found.documents) != seq_len:
        raise _wrong(
            row, f"has documents of {sum(found.documents)} tokens", f"they add up to {seq_len}"
        )


def _is_alike(after: object, before: object) -> bool:
    if after is before:
        return True
    if isinstance(after, np.ndarray) and isinstance(before, np.ndarray):
        return np.array_equal(after, before)
    return type(after) is type(before) and after == before


def _shape(value: object) -> str:
    return f"{[*value.shape]} {value.dtype}" if isinstance(value, np.ndarray) else repr(value)[:60]


def _wrong(row: Plugin, fact: str, rule: str) -> ConfigError:
    return ConfigError(
        fact=f"{row.kind} {row.name} {fact}", rule=rule, remedy=f"correct {row.target}"
    )
