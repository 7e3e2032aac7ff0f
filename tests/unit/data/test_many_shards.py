"""Seventy thousand shards, more than Linux maps for a process, and a million packed documents, open at little cost."""

import os
import random
import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raymega.data.arrow import MOST_MAPS, ShardWriter
from raymega.data.format import META_FILE, SplitMeta, encode_meta
from raymega.data.open_split import Shape, open_split
from raymega.data.streaming import node_cache
from tests.unit.data.datasets import write_dataset

NUM_SHARDS, NUM_FILES, SHARD_TOKENS, SEQ_LEN = 70_000, 64, 130, 64
LINUX_MAPS = 65_530
ROWS_OF_SHARD = 2


def _write_many(folder: Path) -> None:
    """Write a dataset of NUM_SHARDS shards, whose files are further names of NUM_FILES different ones."""
    tokens = (SHARD_TOKENS,) * NUM_FILES
    meta = write_dataset(folder, train=tokens, valid=(), vocab_size=1 << 14)
    files = meta.splits["train"].shards
    shards = [
        replace(files[n % NUM_FILES], file=f"train/{n:06d}-of-many.arrow")
        for n in range(NUM_SHARDS)
    ]
    for n, shard in enumerate(shards):
        os.link(folder / files[n % NUM_FILES].file, folder / shard.file)
    split = replace(meta.splits["train"], shards=tuple(shards))
    (folder / META_FILE).write_bytes(encode_meta(replace(meta, splits={"train": split})))


@pytest.mark.wide
def test_seventy_thousand_shards_are_read_in_any_order(tmp_path, capsys):
    """Each row is that of its shard, and no more maps are held than a process keeps."""
    _write_many(tmp_path)
    began = time.process_time()
    source = open_split(str(tmp_path), "train", Shape(seq_len=SEQ_LEN), seed=0)
    opened_s = time.process_time() - began
    assert source.num_windows == ROWS_OF_SHARD * NUM_SHARDS
    for number in random.Random(0).sample(range(source.num_windows), LINUX_MAPS + 2_000):
        shard, inside = divmod(number, ROWS_OF_SHARD)
        first = shard % NUM_FILES * SHARD_TOKENS + inside * SEQ_LEN
        assert source.row(number).tokens.tolist() == list(range(first, first + SEQ_LEN)), number
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    assert MOST_MAPS / 2 < maps < MOST_MAPS + 2_000
    with capsys.disabled():
        print(f"\n  {NUM_SHARDS:,} shards open in {opened_s:.2f} CPU s, {maps:,} maps")


@pytest.mark.wide
def test_a_million_packed_documents_open_in_little_memory(tmp_path, capsys, monkeypatch):
    """Lengths are drawn as those of web pages: half are below 100 tokens, and one in a thousand is cut."""
    monkeypatch.setattr(node_cache, "cache_root", lambda: tmp_path / "cache")
    draw, shards = np.random.default_rng(0), []
    for number in range(10):
        with ShardWriter(tmp_path, f"train/{number:06d}.arrow", dtype="uint16") as writer:
            for length in np.maximum(1, draw.lognormal(np.log(100), 1.0, 100_000)).astype(int):
                writer.append(np.zeros(length, dtype=np.uint16))
            shards.append(writer.close())
    meta = replace(
        write_dataset(tmp_path, train=(), valid=()),
        splits={"train": SplitMeta(shards=tuple(shards), num_text_bytes=1)},
    )
    (tmp_path / META_FILE).write_bytes(encode_meta(meta))
    shape = Shape(seq_len=2048, packing="best_fit", window=4096)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    source = open_split(str(tmp_path), "train", shape, seed=0)
    opened_s = time.process_time() - began
    held_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert sum(shard.num_documents for shard in shards) == 1_000_000 and held_mb < 100
    with capsys.disabled():
        print(
            f"\n  1,000,000 documents in {source.num_windows:,} rows open in {opened_s:.2f} CPU s, {held_mb:.0f} MB"
        )
