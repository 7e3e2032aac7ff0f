"""Checks a job's data in the driver before any worker starts; loads no torch.

It owns the checks. The facts about one dataset come from `raymega.data.format`.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from raymega.data.format import META_FILE, DatasetMeta, local_folder, read_meta, size_faults
from raymega.data.open_split import missing_split, no_documents, short_split
from raymega.data.remote_dataset import is_remote, meta_at, missing_shards
from raymega.data.synthetic import SYNTHETIC_PATH, SYNTHETIC_VOCAB_SIZE
from raymega.errors import Fault, RaymegaError
from raymega.storage.registry import reading_faults

MIN_BPE_VOCAB_SIZE = 257
"""Smallest BPE vocabulary: the 256 bytes and the end-of-document token."""


def data_faults(
    path: str,
    *,
    seq_len: int,
    vocab_size: int,
    needs_valid: bool = False,
    is_packed: bool = False,
) -> list[Fault]:
    """Return all faults of ``data.path``.

    Args:
        path: Value of ``data.path``.
        seq_len: Value of ``data.seq_len``; 0 if unknown, then not checked.
        vocab_size: Value of ``model.vocab_size``; 0 if unknown, then not checked.
        needs_valid: True if the job evaluates, which needs a validation split.
        is_packed: True if the job packs documents, which needs a dataset with document lengths.
    """
    wants = _Wants(
        seq_len=seq_len, vocab_size=vocab_size, needs_valid=needs_valid, is_packed=is_packed
    )
    if path == SYNTHETIC_PATH:
        return _vocabulary_faults(path, SYNTHETIC_VOCAB_SIZE, vocab_size)
    try:
        if is_remote(path):
            return _remote_faults(path, wants)
        folder = local_folder(path)
        if not (folder / META_FILE).is_file():
            return [_not_prepared(path, folder, vocab_size)]
        meta = read_meta(folder)
    except RaymegaError as error:
        return [fault for fault in error.faults if isinstance(fault, Fault)]
    return [*_content_faults(path, meta, wants), *size_faults(folder, meta)]


def dataset_identity(path: str) -> str:
    """Return a digest of the dataset's content, 16 characters; the same for every copy of it.

    The built-in synthetic tokens have their path as identity.

    Raises:
        ConfigError: There is no dataset at ``path``.
    """
    if path == SYNTHETIC_PATH:
        return SYNTHETIC_PATH
    # The order of shards is part of the content; their paths are not.
    shards = [
        (name, shard.num_tokens, shard.crc32)
        for name, split in sorted(meta_at(path).splits.items())
        for shard in split.shards
    ]
    return blake2b(repr(shards).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wants:
    """Requirements of the job on its data; see :func:`data_faults`."""

    seq_len: int
    vocab_size: int
    needs_valid: bool
    is_packed: bool


def _remote_faults(path: str, wants: _Wants) -> list[Fault]:
    """Return the faults of a dataset in an object store, or those of a store that is unreadable."""
    # An unreachable store has one fault, not one a shard.
    refusals = reading_faults(path, field="data.path")
    if refusals:
        return refusals
    meta = meta_at(path)
    return [*_content_faults(path, meta, wants), *missing_shards(path, meta)]


def _content_faults(path: str, meta: DatasetMeta, wants: _Wants) -> list[Fault]:
    lacks_valid = wants.needs_valid and "valid" not in meta.splits
    lacks_documents = wants.is_packed and not meta.has_documents
    return [
        *([missing_split(path, "valid")] if lacks_valid else []),
        *([no_documents(path)] if lacks_documents else []),
        *_vocabulary_faults(path, meta.vocab_size, wants.vocab_size),
        *([] if wants.is_packed else _length_faults(path, meta, wants.seq_len)),
    ]


def _not_prepared(path: str, folder: Path, vocab_size: int) -> Fault:
    rule = f"it must be `{SYNTHETIC_PATH}` or a folder with the {META_FILE} of a prepared dataset"
    command = f"raymega data prepare {{}} --out {{}} --tokenizer bpe:{max(vocab_size or 32768, MIN_BPE_VOCAB_SIZE)}"
    if not folder.exists():
        line = command.format("INPUT...", path)
        return Fault(fact=f"data.path={path!r} does not exist", rule=rule, remedy=f"run `{line}`")
    prepared = f"{path.rstrip('/')}-tokens"
    line = command.format(path, prepared)
    return Fault(
        fact=f"data.path={path!r} has no {META_FILE}",
        rule=f"{rule}; raw text is not read, nor a preparation that did not finish",
        remedy=f"run `{line}` and set data.path={prepared}",
    )


def _vocabulary_faults(path: str, tokens: int, rows: int) -> list[Fault]:
    if rows == 0 or tokens <= rows:
        return []
    return [
        Fault(
            fact=f"model.vocab_size={rows}",
            rule=f"data.path={path!r} has tokens up to {tokens - 1}, so it must be at least "
            f"{tokens}",
            remedy=f"set model.vocab_size={tokens}; the table is padded by itself",
        )
    ]


def _length_faults(path: str, meta: DatasetMeta, seq_len: int) -> list[Fault]:
    return [
        short_split(path, name, split.num_tokens, seq_len)
        for name, split in meta.splits.items()
        if seq_len > 0 and split.num_tokens <= seq_len
    ]
