"""Writes small datasets for tests: a stream of known tokens in shards of known lengths."""

import numpy as np

from raymega.config.data import DataSource
from raymega.data.arrow import ShardWriter
from raymega.data.blends.mixture import Mixture
from raymega.data.format import META_FILE, DatasetMeta, SourceMeta, SplitMeta, encode_meta
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


def _write_split(folder, name, sizes, first, most):
    shards = []
    for index, size in enumerate(sizes):
        with ShardWriter(folder, f"{name}/{index:06d}.arrow", dtype="uint16") as writer:
            writer.append((np.arange(first, first + size) % most).astype(np.uint16))
            shards.append(writer.close())
        first += size
    return SplitMeta(shards=tuple(shards), num_text_bytes=first)
