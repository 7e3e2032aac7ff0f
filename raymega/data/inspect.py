"""Describes a prepared dataset and, on request, verifies the checksums of all its shards.

It owns the check of checksums. Sizes are checked by `raymega.data.format`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from raymega.data.arrow import TokenStream, file_crc32
from raymega.data.format import (
    DatasetMeta,
    RowFormat,
    ShardMeta,
    SplitMeta,
    local_folder,
    size_faults,
    wrong_crc32,
)
from raymega.data.open_split import Shape, labels_of, missing_split, no_documents, packed
from raymega.data.order import num_blocks, two_blocks_bytes
from raymega.data.rows import ANSWERS, PAIRS, TEXTS, RowForm
from raymega.data.streaming.remote_dataset import (
    is_remote,
    meta_at,
    missing_shards,
    open_files,
    shard_crc32,
)
from raymega.data.streaming.stream_rows import StreamDocuments
from raymega.errors import ConfigError, DataError, Fault, raise_faults
from raymega.storage.registry import open_store, reading_faults

FORMS: dict[RowFormat, RowForm] = {
    "preference": PAIRS, "kto": ANSWERS, "classification": RowForm("classes", 1),
    "token_classification": RowForm("tokens", 1), "embedding": RowForm("matches", 2),
    "regression": RowForm("values", 1),
}  # fmt: skip
"""Form of the documents of datasets that are no texts, by format."""


def inspect_dataset(
    uri: str, *, is_verified: bool, on_shard: Callable[[int, int], None]
) -> DatasetMeta:
    """Return the description of the dataset at ``uri`` after checking its shards.

    Args:
        uri: Folder of the dataset, or its URI in an object store.
        is_verified: True to read every shard and compare its checksum, too.
        on_shard: Callback with (done, total) after each shard that was read.

    Raises:
        ConfigError: There is no dataset, or its store cannot be reached.
        DataError: Some shards are missing or damaged; the message names all of them.
    """
    if is_remote(uri):
        raise_faults(ConfigError, reading_faults(uri, field="URI"))
    meta = meta_at(uri)
    # presence and sizes first: they cost no read of a shard
    gaps = missing_shards(uri, meta) if is_remote(uri) else size_faults(local_folder(uri), meta)
    raise_faults(DataError, gaps)
    if is_verified:
        shards = [file for split in meta.splits.values() for file in split.files]
        raise_faults(DataError, _checksum_faults(uri, shards, on_shard))
    return meta


def describe_packing(uri: str, meta: DatasetMeta, shape: Shape) -> dict[str, dict[str, float]]:
    """Return by split the packed rows, their efficiency, longest document and mean context.

    Raises:
        DataError: The shards do not hold the lengths of their documents.
    """
    (_, files), found = open_files(uri), {}
    raise_faults(DataError, [] if meta.has_documents else [no_documents(uri)])
    for name, split in meta.splits.items():
        stream = TokenStream(files, split)
        # groups of documents stay in one row, as a job of this format reads them
        form = _form(stream, meta)
        is_pair = form in (PAIRS, ANSWERS)
        split_shape = replace(shape, form=form, pairs="alone" if is_pair else "none")
        labels = labels_of(stream, meta, split_shape.counted_on)
        lengths = stream.document_lengths()
        documents = StreamDocuments(stream, lengths, vocab_size=meta.vocab_size, labels=labels)
        source = packed(documents, split_shape)
        found[name] = {
            "rows": source.num_windows,
            "packing_efficiency": round(source.efficiency, 4),
            "longest_document": int(documents.lengths.max()),
            "mean_context": round(source.context, 1),
        }
        if labels and form.kind != "values":  # of which no byte says that a token has none
            found[name] |= _describe_labels(documents, shape.seq_len // max(1, form.size))
    return found


def _form(stream: TokenStream, meta: DatasetMeta) -> RowForm:
    """Return the form of a dataset's documents; all its questions have as many choices as the first one."""
    if meta.row_format == "multiple_choice":
        return RowForm("choices", int(stream.read_targets(0, 1)[0]) // 2)
    return FORMS.get(meta.row_format, TEXTS)


def describe_blocks(meta: DatasetMeta, split: str, block_bytes: int) -> dict[str, int]:
    """Return the blocks of a split's order, and the bytes of two of them.

    Raises:
        ConfigError: There is no such split.
    """
    if split not in meta.splits:
        raise ConfigError(missing_split("the dataset", split))
    sizes = np.array([shard.num_bytes for shard in meta.splits[split].shards])
    return {
        "blocks": num_blocks(sizes, block_bytes),
        "two_blocks_bytes": two_blocks_bytes(sizes, block_bytes),
    }


def _describe_labels(documents: StreamDocuments, seq_len: int) -> dict[str, float]:
    """Return how many documents are truncated to ``seq_len`` tokens, and how many have no label left then."""
    kept = np.minimum(documents.lengths, seq_len).tolist()
    masks = (documents.counted(document, 0, length) for document, length in enumerate(kept))
    counts = [int(mask.sum()) for mask in masks if mask is not None]
    return {
        "truncated": int((documents.lengths > seq_len).sum()),
        "without_labels": counts.count(0),
        "labels": sum(counts),
    }


def describe(meta: DatasetMeta) -> dict[str, Any]:
    """Return the content of dataset.json as plain values, for people and for JSON."""
    return {
        "splits": {name: _describe_split(split) for name, split in meta.splits.items()},
        **({"row_format": meta.row_format} if meta.has_targets else {}),
        "tokenizer": meta.recipe["tokenizer"],
        "tokenizer_sample_bytes": meta.source.num_tokenizer_bytes,
        "vocab_size": meta.vocab_size,
        "eod_id": meta.eod_id,
        "eod_token": meta.tokenizer.eod_token,
        **({"bos_id": meta.tokenizer.bos_id} if meta.tokenizer.bos_id >= 0 else {}),
        "valid_unigram_entropy_nats": meta.valid_entropy,
        "unigram_smoothing": "add one to every train count",
        "source_files": meta.source.num_files,
        "source_bytes": meta.source.num_bytes,
        "replaced_characters": meta.source.num_replaced,
        "bad_lines": meta.source.num_bad_lines,
    }


def _describe_split(split: SplitMeta) -> dict[str, float]:
    return {
        "documents": split.num_documents,
        "text_bytes": split.num_text_bytes,
        "tokens": split.num_tokens,
        "shards": len(split.shards),
        "bytes_per_token": round(split.num_text_bytes / split.num_tokens, 3),
    }


def _checksum_faults(
    uri: str, shards: list[ShardMeta], on_shard: Callable[[int, int], None]
) -> list[Fault]:
    faults = []
    for done, shard in enumerate(shards, start=1):
        # all shards are read, so that the message can name every damaged one
        crc = _crc32(uri, shard)
        if crc != shard.crc32:
            faults.append(wrong_crc32(f"{uri.rstrip('/')}/{shard.file}", crc, shard))
        on_shard(done, len(shards))
    return faults


def _crc32(uri: str, shard: ShardMeta) -> int:
    if is_remote(uri):
        return shard_crc32(open_store(uri), shard)
    return file_crc32(local_folder(uri) / shard.file)
