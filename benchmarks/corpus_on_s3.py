"""A corpus of random tokens in an S3 service on this machine, for runs that read it through a cache of a twentieth.

The service is moto's, in memory and in a process of its own. Workers get its address from this process's environment,
which Ray's processes inherit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from raymega.data.arrow import ShardWriter
from raymega.data.format import META_FILE, DatasetMeta, SourceMeta, SplitMeta, encode_meta
from raymega.storage.registry import open_store
from tests.support.servers.s3_server import BUCKET, environment, exported, moto_server

NUM_SHARDS, SHARD_TOKENS, VOCAB = 200, 8192, 256
CACHE_SHARE = 0.05
"""Share of the corpus that a node may keep; half of it is shuffled together."""


@contextmanager
def corpus_on_s3() -> Iterator[list[str]]:
    """Yield the settings of a job that trains on the corpus; the service lives as long as the body."""
    with moto_server() as endpoint, exported(environment(endpoint)):
        uri = f"s3://{BUCKET}/tokens"
        with tempfile.TemporaryDirectory() as name:
            num_bytes = _write(Path(name))
            store = open_store(uri)
            for path in sorted(Path(name).rglob("*.*")):
                store.put(path.relative_to(name).as_posix(), [path.read_bytes()], overwrite=False)
        cache = int(CACHE_SHARE * num_bytes)
        yield [f"data.path={uri}", f"data.cache_bytes={cache}", f"data.shuffle_block_bytes={cache // 2}"]  # fmt: skip


def _write(folder: Path) -> int:
    """Write the dataset, and return the bytes of its shards."""
    random, shards = np.random.default_rng(0), []
    for index in range(NUM_SHARDS):
        with ShardWriter(folder, f"train/{index:06d}.arrow", dtype="uint16") as writer:
            writer.append(random.integers(0, VOCAB, SHARD_TOKENS).astype(np.uint16))
            shards.append(writer.close())
    split = SplitMeta(shards=tuple(shards), num_text_bytes=NUM_SHARDS * SHARD_TOKENS)
    source = SourceMeta(
        inputs=("random",), num_files=1, num_bytes=1, num_replaced=0, num_tokenizer_bytes=0
    )
    meta = DatasetMeta(
        recipe={"tokenizer": "bytes"}, vocab_size=VOCAB, eod_id=0, dtype="uint16",
        splits={"train": split}, valid_entropy=0.0, source=source, version=2,
    )  # fmt: skip
    (folder / META_FILE).write_bytes(encode_meta(meta))
    return sum(shard.num_bytes for shard in shards)
