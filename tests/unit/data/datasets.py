"""Writes small datasets for tests: a stream of known tokens in shards of known lengths."""

from dataclasses import replace
from zlib import crc32

import numpy as np

from raymega.config.data import DataSource
from raymega.data.arrow import ShardWriter, TokenStream
from raymega.data.blends.mixture import Mixture
from raymega.data.format import (
    LENGTHS_DTYPE,
    META_FILE,
    DatasetMeta,
    SourceMeta,
    SplitMeta,
    encode_meta,
    lengths_meta,
)
from raymega.data.samples import Samples


def samples_of(source, *, seed=0, block_bytes=1 << 40):
    """The samples of a run on one source."""
    return Samples(
        [source], Mixture([(0, [DataSource(path="alone")])]), seed=seed, block_bytes=block_bytes
    )


def write_dataset(
    folder, *, train=(50, 30), valid=(20,), vocab_size=257, version=2, first=0, most=1 << 16
):
    """Splits whose streams count 0, 1, 2, ... below ``most``, and from 0 again.

    ``train`` and ``valid`` are lengths of shards, each of one document.
    """
    lengths = {"train": train, "valid": valid}
    splits = {
        name: _write_split(folder, name, sizes, first, most)
        for name, sizes in lengths.items()
        if sizes
    }
    meta = DatasetMeta(
        recipe={"tokenizer": "bytes"},
        vocab_size=vocab_size,
        eod_id=vocab_size - 1,
        dtype="uint16",
        splits=splits,
        valid_entropy=1.5,
        source=SourceMeta(
            inputs=("x",), num_files=1, num_bytes=1, num_replaced=0, num_tokenizer_bytes=0
        ),
        version=version,
    )
    (folder / META_FILE).write_bytes(encode_meta(meta))
    return meta


def write_documents(folder, *, num_shards, per_shard, longest=99, seed=5):
    """A train split of random documents of up to ``longest`` tokens, without a file of lengths."""
    draw, shards = np.random.default_rng(seed), []
    meta = write_dataset(folder, train=(1,), valid=())
    for number in range(num_shards):
        with ShardWriter(folder, f"train/{number:06d}.arrow", dtype="uint16") as writer:
            for length in draw.integers(1, longest, per_shard, endpoint=True).tolist():
                writer.append(draw.integers(0, 256, length).astype(np.uint16))
            shards.append(writer.close())
    split = SplitMeta(shards=tuple(shards), num_text_bytes=1)
    meta = replace(meta, splits={"train": split})
    (folder / META_FILE).write_bytes(encode_meta(meta))
    return meta


def with_lengths(folder, meta):
    """The dataset with files of lengths, as a preparation writes it."""
    splits = {}
    for name, split in meta.splits.items():
        lengths = TokenStream(folder, replace(split, lengths=None)).document_lengths()
        content = lengths.astype(LENGTHS_DTYPE).tobytes()
        described = lengths_meta(name, split.shards, crc32=crc32(content))
        (folder / described.file).write_bytes(content)
        splits[name] = replace(split, lengths=described)
    meta = replace(meta, splits=splits)
    (folder / META_FILE).write_bytes(encode_meta(meta))
    return meta


def _write_split(folder, name, sizes, first, most):
    shards = []
    for index, size in enumerate(sizes):
        with ShardWriter(folder, f"{name}/{index:06d}.arrow", dtype="uint16") as writer:
            writer.append((np.arange(first, first + size) % most).astype(np.uint16))
            shards.append(writer.close())
        first += size
    return SplitMeta(shards=tuple(shards), num_text_bytes=first)
