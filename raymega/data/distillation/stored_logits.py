"""Largest logits of a teacher for every token of a dataset's training split, in two arrays beside its shards.

`raymega.evaluate.teacher` computes them once. A job may use them if its rows are cut as they were then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import shake_128
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raymega.config.data import DataSection
from raymega.config.schema import Job
from raymega.data.format import local_folder
from raymega.data.heads.form import job_form
from raymega.data.open_split import open_split, shape_of, split_key
from raymega.data.preference.dataset_folder import has_folder, no_folder
from raymega.data.rows import Source
from raymega.data.streaming.remote_dataset import meta_at
from raymega.errors import ConfigError, Fault

SPLIT = "train"
"""Split whose rows a teacher is asked about: a held-out loss is that of labels."""
CUT = ("seq_len", "packing", "packing_window", "document_multiple", "loss_on")
"""Fields of the data section that decide which tokens a row has, and what each of them sees."""
VOCABULARY = "model.vocab_size"
"""Field with the number of tokens that the logits are over."""
COMMAND = "`raymega data teacher JOB.yaml`"
Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


class TeacherRows(Protocol):
    """Largest logits of a teacher by row of a split."""

    def row(self, number: int) -> tuple[Ids, Logits]:
        """Return tokens and their logits of row ``number``, [S, k] each, largest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitFiles:
    """Places of the stored logits of a dataset: ``ids`` and ``logits`` [N, S, k], and what they are of."""

    ids: Path
    logits: Path
    how: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRows:
    """Stored logits of a split, mapped into memory; rows are read when they are asked for."""

    ids: Ids
    logits: Logits
    k: int

    def row(self, number: int) -> tuple[Ids, Logits]:
        """Return the first k tokens and logits of a row, [S, k] each."""
        return self.ids[number, :, : self.k], self.logits[number, :, : self.k]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnRows:
    """Logits that no model made, for synthetic tokens: a verification reads them, and a run is refused.

    Attributes:
        name: Name of the tokens.
        seq_len: Number of tokens of a row (S).
        k: Number of logits of a token.
        vocab_size: Number of tokens of the vocabulary (V), at least k.
    """

    name: str
    seq_len: int
    k: int
    vocab_size: int

    def row(self, number: int) -> tuple[Ids, Logits]:
        """Return drawn tokens and logits of a row, [S, k] each; no token of a position twice."""
        digits = shake_128(f"{self.name}/teacher/{number}".encode()).digest(
            4 * self.seq_len * (self.k + 1)
        )
        drawn = np.frombuffer(digits, dtype="<u4").reshape(self.seq_len, self.k + 1)
        # tokens at equal distances around the vocabulary, from one that is drawn
        steps = np.arange(self.k) * (self.vocab_size // self.k)
        ids = (drawn[:, :1].astype(np.int64) + steps) % self.vocab_size
        logits = -np.sort(drawn[:, 1:] / -(2.0**30), axis=1)  # from 4 to 0
        return ids.astype(np.int32), logits.astype(np.float32)


def logit_files(path: str) -> LogitFiles:
    """Return the files of a dataset in a folder."""
    folder = local_folder(path)
    return LogitFiles(
        ids=folder / f"teacher-{SPLIT}.ids.npy",
        logits=folder / f"teacher-{SPLIT}.logits.npy",
        how=folder / f"teacher-{SPLIT}.json",
    )


def row_cut(section: DataSection) -> dict[str, object]:
    """Return the fields of a job on which its rows depend, by dotted path."""
    return {f"data.{name}": getattr(section, name) for name in CUT}


def dataset_rows(job: Job, path: str) -> Source:
    """Return the rows of a dataset's training split as a job cuts them."""
    shape = shape_of(job.data, job.preference, job_form(job))
    return open_split(
        path,
        SPLIT,
        shape,
        seed=job.run.seed,
        vocab_size=job.model.vocab_size,
        plugins=job.plugins,
    )


def content_of(path: str) -> str:
    """Return a digest of the split's content, 16 characters."""
    return split_key(meta_at(path), SPLIT)


def create_logits(path: str, shape: tuple[int, int, int]) -> LogitFiles:
    """Make files of zeros for [N, S, k] logits, under names that no reader takes; workers fill them."""
    files = unfinished(logit_files(path))
    for file, dtype in ((files.ids, np.int32), (files.logits, np.float32)):
        np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape).flush()
    return files


class LogitWriter:
    """Writer of one rank's positions into an array [N, S, k] that is there.

    It writes its own bytes alone. Pages of a mapped file would carry those of its neighbours as well, and nodes that
    share the file over a network would write old zeros over what others have written.
    """

    def __init__(self, file: Path) -> None:
        """Open the file of an array."""
        mapped = np.load(file, mmap_mode="r")
        self.shape, self._dtype, self._begin = mapped.shape, mapped.dtype, mapped.offset
        self._file = file.open("r+b", buffering=0)

    def write(self, row: int, positions: Ids, values: npt.NDArray[Any]) -> None:
        """Write ``values`` [n, k] at some positions [n] of a row."""
        kept, (_, num_positions, k) = values.astype(self._dtype), self.shape
        # neighbours together: context parallelism gives a rank two runs of positions
        for run in np.split(np.arange(len(kept)), np.flatnonzero(np.diff(positions) != 1) + 1):
            place = row * num_positions + int(positions[run[0]])
            self._file.seek(self._begin + place * k * self._dtype.itemsize)
            self._file.write(kept[run].tobytes())

    def close(self) -> None:
        """Return when everything is on the disk."""
        os.fsync(self._file.fileno())
        self._file.close()


def unfinished(files: LogitFiles) -> LogitFiles:
    """Return the names that the files have while they are being written."""
    ids, logits, how = (
        file.with_name(f".{file.name}.tmp") for file in (files.ids, files.logits, files.how)
    )
    return LogitFiles(ids=ids, logits=logits, how=how)


def finish_logits(path: str, how: Mapping[str, object]) -> None:
    """Give the files their names, the one that tells what they are of last."""
    files = logit_files(path)
    written = unfinished(files)
    files.how.unlink(missing_ok=True)
    written.how.write_text(json.dumps(dict(how)), encoding="utf-8")
    for before, after in (
        (written.ids, files.ids),
        (written.logits, files.logits),
        (written.how, files.how),
    ):
        before.replace(after)


def stored_how(path: str) -> dict[str, Any]:
    """Return what a dataset's stored logits are of; empty where there are none."""
    if not has_folder(path) or not logit_files(path).how.is_file():
        return {}
    found: dict[str, Any] = json.loads(logit_files(path).how.read_text(encoding="utf-8"))
    return found


def logit_faults(
    path: str, section: DataSection, *, top_k: int, vocab_size: int
) -> Iterator[Fault]:
    """Yield the faults of a dataset without logits of its rows as a job cuts them, over a vocabulary of the job's size."""
    name, remedy = "distillation.teacher=stored", f"run {COMMAND} with this job's file and settings"
    if not has_folder(path):
        stored = "logits of a teacher lie"
        yield no_folder(f"{name} with ", path, stored=stored, other="distillation.teacher=live")
        return
    # the file that tells what the others hold is written last
    how = stored_how(path)
    if not how:
        yield Fault(
            fact=f"{name}, and {path} has no {logit_files(path).how.name}",
            rule="it tells what the stored logits of the teacher are of",
            remedy=f"{remedy}, or set distillation.teacher=live",
        )
        return
    # rows, number of logits, vocabulary, tokens
    wanted = row_cut(section)
    for field, value in wanted.items():
        if how.get(field) != value:
            yield Fault(
                fact=f"{name} with {field}={value}",
                rule=f"the logits beside {path} are of rows that {field}={how.get(field)} cuts",
                remedy=remedy,
            )
    if how.get("top_k", 0) < top_k:
        yield Fault(
            fact=f"{name} with distillation.top_k={top_k}",
            rule=f"{how.get('top_k')} logits of a token are stored beside {path}",
            remedy=f"set distillation.top_k={how.get('top_k')}, or {remedy}",
        )
    # a token that the model lacks would count as another one
    if vocab_size and how.get(VOCABULARY) != vocab_size:
        yield Fault(
            fact=f"{name} with {VOCABULARY}={vocab_size}",
            rule=f"the logits beside {path} are over {how.get(VOCABULARY)} tokens, and the divergence compares "
            "the probabilities of the same tokens",
            remedy=f"take a teacher with the model's tokenizer, and {remedy}",
        )
    if how.get("content") != content_of(path):
        yield Fault(
            fact=f"{name}, and {path} has other tokens than those that its logits are of",
            rule="the logits are those of the rows' own tokens",
            remedy=remedy,
        )


def open_logits(path: str, section: DataSection, *, top_k: int, vocab_size: int) -> StoredRows:
    """Open the stored logits of a dataset, for a model with a vocabulary of ``vocab_size``.

    Raises:
        ConfigError: There are none of the job's rows.
    """
    faults = list(logit_faults(path, section, top_k=top_k, vocab_size=vocab_size))
    if faults:
        raise ConfigError(*faults)
    files = logit_files(path)
    return StoredRows(
        ids=np.load(files.ids, mmap_mode="r"), logits=np.load(files.logits, mmap_mode="r"), k=top_k
    )
