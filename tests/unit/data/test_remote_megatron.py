"""Megatron's files in an object store: rows, identity and faults are those of a copy on this machine."""

import numpy as np
import pytest

from raymega.data import megatron
from raymega.data.blends.epochs import cache_need
from raymega.data.checks import data_faults, dataset_identity
from raymega.data.export import index_bytes
from raymega.data.megatron import MegatronStream
from raymega.data.open_split import Shape, open_split
from raymega.data.streaming import bin_parts
from raymega.data.streaming.node_cache import locked
from raymega.errors import ConfigError, StorageError
from raymega.storage.retry import RetryPolicy
from tests.support.jobs import make_test_plan
from tests.unit.data.streamed import CountingStore, make_fetcher, samples_of_source, settle

FAR = "megatron:s3://bucket/corpora/pile"
PART_TOKENS, VOCAB = 400, 1000


@pytest.fixture(params=["uint16", "int32"])
def dtype(request):
    return request.param


@pytest.fixture
def near(tmp_path, dtype, monkeypatch):
    """Prefix of both files on this machine; their tokens are cut into about twenty parts."""
    monkeypatch.setattr(megatron, "SHARD_TOKENS", PART_TOKENS)
    random, folder = np.random.default_rng(0), tmp_path / "corpora"
    folder.mkdir()
    lengths = random.integers(1, 90, 180)
    tokens = random.integers(0, VOCAB, lengths.sum()).astype(dtype)
    (folder / "pile.bin").write_bytes(tokens.tobytes())
    (folder / "pile.idx").write_bytes(index_bytes(lengths, dtype))
    return folder / "pile"


@pytest.fixture
def store(near, monkeypatch, tmp_path):
    """Store in which both files are; a node's cache in a folder of the test."""
    store = CountingStore(near.parent)

    def open_store(uri):
        assert uri == "s3://bucket/corpora"
        return store

    monkeypatch.setattr(bin_parts, "open_store", open_store)
    monkeypatch.setattr(bin_parts, "RETRY", RetryPolicy(pauses_s=()))
    monkeypatch.setattr(megatron, "cache_root", lambda: tmp_path / "driver")
    monkeypatch.setattr(megatron, "reading_faults", lambda *_args, **_named: [])
    return store


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_rows_are_those_of_a_copy_and_each_part_is_fetched_once(near, store, tmp_path, packing):
    shape = Shape(seq_len=16, packing=packing, window=64)
    here = open_split(f"megatron:{near}", "train", shape, seed=1, vocab_size=VOCAB)
    fetcher = make_fetcher(tmp_path / "node")
    far = open_split(FAR, "train", shape, seed=1, vocab_size=VOCAB, fetcher=fetcher)
    looked = store.num_bytes["pile.bin"]
    assert far.num_windows == here.num_windows
    assert far.shards.rows.tolist() == here.shards.rows.tolist() and len(far.shards.rows) > 15
    for index in np.random.default_rng(1).permutation(far.num_windows):
        assert far.row(int(index)).tokens.tolist() == here.row(int(index)).tokens.tolist()
    assert store.num_bytes["pile.bin"] - looked == near.with_suffix(".bin").stat().st_size


def test_epoch_in_blocks_goes_through_a_cache_of_two_of_them(near, store, tmp_path):
    size = near.with_suffix(".bin").stat().st_size
    block, shape = size // 8, Shape(seq_len=16)
    here = samples_of_source(
        open_split(f"megatron:{near}", "train", shape, seed=1, vocab_size=VOCAB), block_bytes=block
    )
    fetcher = make_fetcher(tmp_path / "node", limit_bytes=size // 3)
    far = open_split(FAR, "train", shape, seed=1, vocab_size=VOCAB, fetcher=fetcher)
    num_rows, looked = far.num_windows, store.num_bytes["pile.bin"]
    far = samples_of_source(far, block_bytes=block, fetcher=fetcher)
    for sample in range(num_rows):
        assert far.row(sample).tokens.tolist() == here.row(sample).tokens.tolist()
        with locked(fetcher.root):  # no file comes or goes
            held = sum(path.stat().st_size for path in fetcher.root.rglob("*.bin"))
        assert held <= fetcher.limit_bytes
    settle(fetcher)
    # what the next epoch begins with has come too
    assert store.num_bytes["pile.bin"] - looked <= size + 2 * block


def test_parts_meet_where_a_read_crosses_them(near, store, tmp_path):
    here, far = MegatronStream(str(near)), MegatronStream(FAR[9:], make_fetcher(tmp_path / "node"))
    end = far.shards[0].num_tokens
    for start, stop in ((0, end), (end - 3, end + 5), (0, far.num_tokens)):
        assert far.read(start, stop).tolist() == here.read(start, stop).tolist()


def test_identity_and_faults_are_those_of_a_copy(near, store):
    assert dataset_identity(FAR) == dataset_identity(f"megatron:{near}")
    wants = {"seq_len": 16, "vocab_size": VOCAB}
    assert data_faults(FAR, **wants) == data_faults(f"megatron:{near}", **wants) == []
    (fault,) = data_faults(FAR, **wants, splits=("train", "valid"))
    assert "has no valid split" in fault.fact
    section = make_test_plan("data.shuffle_block_bytes=2000").job.data
    assert 0 < cache_need(FAR, "train", section) < near.with_suffix(".bin").stat().st_size
    assert cache_need(f"megatron:{near}", "train", section) == 0


@pytest.mark.parametrize("ending", ["idx", "bin"])
def test_missing_file_is_named(near, store, ending):
    near.with_suffix(f".{ending}").unlink()
    with pytest.raises(ConfigError, match=rf"s3://bucket/corpora/pile\.{ending} does not exist"):
        MegatronStream(FAR[9:])
    (fault,) = data_faults(FAR, seq_len=16, vocab_size=VOCAB)
    assert f"pile.{ending}" in fault.fact


def test_file_that_became_shorter_is_no_part(near, store, tmp_path):
    far = MegatronStream(FAR[9:], make_fetcher(tmp_path / "node", timeout_s=0.5))
    path = near.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(StorageError, match="is not here after"):
        far.read(far.num_tokens - 5, far.num_tokens)


def test_files_written_anew_have_another_place_on_the_node(near, store):
    before = bin_parts.look_at("s3://bucket/corpora/pile").key
    path = near.with_suffix(".bin")
    path.write_bytes(bytes(reversed(path.read_bytes())))
    assert bin_parts.look_at("s3://bucket/corpora/pile").key != before


def test_rank_opens_what_its_driver_knows_and_its_node_has_without_a_request(
    near, store, tmp_path, monkeypatch
):
    shape, asked = Shape(seq_len=16, packing="best_fit", window=64), []
    known = {FAR: bin_parts.look_at(FAR.removeprefix("megatron:")).known}

    def opened(**more):
        fetcher = make_fetcher(tmp_path / "node")
        fetcher.known = known
        return open_split(FAR, "train", shape, seed=1, vocab_size=VOCAB, fetcher=fetcher)

    first = opened().row(3).tokens.tolist()
    for name in ("get", "size"):
        monkeypatch.setattr(store, name, lambda *told, **_: asked.append(told))
    assert opened().row(3).tokens.tolist() == first and not asked
