import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from raymega.data import arrow
from raymega.data.arrow import ShardWriter, TokenStream, file_crc32, token_dtype
from raymega.data.format import SplitMeta
from raymega.errors import DataError
from tests.unit.data.datasets import write_dataset


@pytest.fixture
def stream(tmp_path):
    meta = write_dataset(tmp_path, train=(7, 1, 12))
    return TokenStream(tmp_path, meta.splits["train"])


def test_every_range_reads_as_one_array_across_shard_borders(stream):
    assert stream.num_tokens == 20
    for start in range(20):
        for stop in range(start + 1, 21):
            tokens = stream.read(start, stop)
            assert tokens.dtype == np.int64 and tokens.tolist() == list(range(start, stop))


@pytest.mark.parametrize("start, stop", [(-1, 3), (3, 3), (0, 21)])
def test_ranges_outside_the_stream_are_refused(stream, start, stop):
    with pytest.raises(IndexError, match="of a stream of 20"):
        stream.read(start, stop)


def test_writer_flushes_batches_and_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "BATCH_TOKENS", 8)
    with ShardWriter(tmp_path, "train/a.arrow", dtype="uint32") as writer:
        for first in range(0, 30, 5):
            writer.append(np.arange(first, first + 5, dtype=np.uint32))
        meta = writer.close()
    path = tmp_path / "train/a.arrow"
    assert (meta.num_documents, meta.num_tokens) == (6, 30)
    assert (meta.num_bytes, meta.crc32) == (path.stat().st_size, file_crc32(path))
    assert list(tmp_path.rglob("*.partial")) == []


def test_ranges_read_across_batches_as_one_array(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "BATCH_TOKENS", 8)
    for dtype in ("uint16", "uint32"):
        with ShardWriter(tmp_path, f"{dtype}.arrow", dtype=dtype, has_targets=True) as writer:
            for first in range(0, 30, 5):
                tokens = np.arange(first, first + 5, dtype=dtype)
                writer.append(tokens, (tokens % 3).astype(np.uint8))
            split = SplitMeta(shards=(writer.close(),), num_text_bytes=1)
        stream = TokenStream(tmp_path, split)
        for start, stop in ((0, 30), (3, 4), (9, 11), (12, 29)):
            assert stream.read(start, stop).tolist() == list(range(start, stop))
            targets = stream.read_targets(start, stop).tolist()
            assert targets == [token % 3 for token in range(start, stop)]
        documents = list(arrow.shard_documents(tmp_path / f"{dtype}.arrow"))
        assert [each.tolist() for each, _ in documents] == [list(range(at, at + 5)) for at in range(0, 30, 5)]  # fmt: skip


PROBE = """
import sys
from raymega.data.open_split import Shape, open_split
for packing in ("none", "best_fit"):
    source = open_split(sys.argv[1], "train", Shape(seq_len=4, packing=packing), seed=0)
    print(source.row(0).tokens.tolist(), "pandas" in sys.modules)
"""


def test_first_rows_of_a_process_load_no_pandas(tmp_path):
    """It takes 0.3 s of a core, in the first step of a rank that takes another's place."""
    write_dataset(tmp_path, train=(7, 1, 12))
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, tmp_path], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[0, 1, 2, 3] False\n" * 2


def test_writer_leaves_nothing_when_it_fails(tmp_path):
    with pytest.raises(KeyError), ShardWriter(tmp_path, "a.arrow", dtype="uint16"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_shard_that_is_no_arrow_file_is_named(tmp_path):
    meta = write_dataset(tmp_path)
    (tmp_path / "train/000001.arrow").write_bytes(b"no arrow")
    stream = TokenStream(tmp_path, meta.splits["train"])
    assert stream.read(0, 50).tolist() == list(range(50))
    with pytest.raises(DataError, match=r"000001\.arrow cannot be read"):
        stream.read(49, 51)


@pytest.mark.parametrize("damaged", [b"24,-2", b"1x,10", b"12 10", b"12,11", b"12.10"])
def test_lengths_that_no_documents_have_are_refused(tmp_path, damaged):
    with ShardWriter(tmp_path, "a.arrow", dtype="uint16") as writer:
        writer.append(np.arange(12, dtype=np.uint16))
        writer.append(np.arange(10, dtype=np.uint16))
        shard = writer.close()
    stream = TokenStream(tmp_path, SplitMeta(shards=(shard,), num_text_bytes=1))
    assert stream.document_lengths().tolist() == [12, 10]
    path = tmp_path / "a.arrow"
    whole = path.read_bytes()
    assert whole.count(b"12,10") == 1
    path.write_bytes(whole.replace(b"12,10", damaged))
    with pytest.raises(DataError, match=r"a\.arrow"):
        stream.document_lengths()


def test_dtype_is_the_narrowest_that_holds_the_vocabulary():
    assert (token_dtype(1 << 16), token_dtype((1 << 16) + 1)) == ("uint16", "uint32")


def test_shards_read_the_longest_ago_are_unmapped(tmp_path, monkeypatch):
    """A process may have 65,530 maps, and a corpus more shards."""
    monkeypatch.setattr(arrow, "_map_shard", lru_cache(3)(arrow._map_shard.__wrapped__))
    stream = TokenStream(tmp_path, write_dataset(tmp_path, train=(2,) * 40).splits["train"])

    def num_maps():  # by file: the kernel may list a map twice while other threads map memory
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len({line.split()[-1] for line in maps if str(tmp_path) in line})

    assert stream.read(0, 80).tolist() == list(range(80))
    assert stream.read(0, 80).tolist() == list(range(80))
    assert num_maps() == 3
