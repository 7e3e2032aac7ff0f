"""Datasets in an object store: the driver's questions, and the one copy of a node."""

import multiprocessing
from uuid import uuid4

import pytest

from raymega.data.checks import data_faults
from raymega.data.format import META_FILE
from raymega.data.inspect import inspect_dataset
from raymega.data.open_split import Shape, open_split
from raymega.data.remote_dataset import local_copy, meta_at
from raymega.errors import ConfigError, DataError, StorageError
from raymega.storage.registry import open_store
from tests.support.servers.s3_server import BUCKET, environment, exported, free_port, moto_server
from tests.unit.data.datasets import write_dataset


@pytest.fixture(scope="module")
def endpoint():
    with moto_server() as at, exported(environment(at)):
        yield at


@pytest.fixture
def uri(endpoint):
    return f"s3://{BUCKET}/{uuid4().hex}/tokens"


@pytest.fixture
def meta(uri, tmp_path):
    folder = tmp_path / "made"
    meta = write_dataset(folder)
    for path in folder.rglob("*.*"):
        key = path.relative_to(folder).as_posix()
        open_store(uri).put(key, [path.read_bytes()], overwrite=False)
    return meta


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def _corrupt(uri, file):
    content = bytearray(open_store(uri).get(file))
    content[200] ^= 1
    open_store(uri).put(file, [bytes(content)], overwrite=True)


def test_split_opens_from_a_store_with_the_same_tokens(uri, meta, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    far = open_split(uri, "train", Shape(seq_len=16), seed=0)
    near = open_split(str(tmp_path / "made"), "train", Shape(seq_len=16), seed=0)
    assert far.num_windows == near.num_windows == 4
    assert all((far.window(i) == near.window(i)).all() for i in range(4))
    (copy,) = (tmp_path / "home/.raymega/cache").iterdir()
    assert (copy / META_FILE).is_file() and meta_at(uri) == meta


def test_copy_is_made_once_and_mended(uri, meta, cache, monkeypatch):
    folder = local_copy(uri, cache=cache)
    for shard in meta.splits["train"].shards:
        open_store(uri).delete(shard.file)
    assert local_copy(uri, cache=cache) == folder
    (folder / "valid/000000.arrow").write_bytes(b"cut")
    assert local_copy(uri, cache=cache) == folder
    assert (folder / "valid/000000.arrow").stat().st_size == meta.splits["valid"].shards[
        0
    ].num_bytes
    assert not list(folder.rglob("*.partial"))


def _copy(uri, cache, barrier, results):
    import raymega.data.remote_dataset as remote

    brought = []
    bring = remote._bring
    remote._bring = lambda store, shard, folder: (
        brought.append(shard.file),
        bring(store, shard, folder),
    )[1]
    barrier.wait(100)
    local_copy(uri, cache=cache)
    results.put(brought)


def test_one_of_the_workers_of_a_node_brings_it(uri, meta, cache):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_copy, args=(uri, cache, barrier, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    brought = sorted(len(results.get(timeout=100)) for _ in workers)
    for worker in workers:
        worker.join(100)
    assert brought == [0, 0, 3]


def test_corrupt_and_missing_shards_are_named_and_never_get_their_name(uri, meta, cache):
    _corrupt(uri, "train/000001.arrow")
    open_store(uri).delete("valid/000000.arrow")
    with pytest.raises(DataError) as caught:
        local_copy(uri, cache=cache)
    assert f"{uri}/train/000001.arrow has crc32" in str(caught.value)
    assert f"{uri}/valid/000000.arrow does not exist" in str(caught.value)
    (folder,) = cache.iterdir()
    assert [path.name for path in folder.rglob("*.arrow")] == ["000000.arrow"]
    assert not (folder / META_FILE).exists()


def test_cache_that_cannot_be_written_is_a_storage_error(uri, meta, cache):
    cache.write_text("a file")
    with pytest.raises(StorageError, match=r"cannot be copied to .*: Not a directory"):
        local_copy(uri, cache=cache)


def test_driver_is_told_everything_without_a_copy(uri, meta, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_faults(uri, seq_len=8, vocab_size=257, needs_valid=True) == []
    open_store(uri).delete("train/000001.arrow")
    texts = [fault.fact for fault in data_faults(uri, seq_len=20, vocab_size=256)]
    assert texts == [
        "model.vocab_size=256",
        f"the valid split of {uri} has 20 tokens",
        f"{uri}/train/000001.arrow does not exist",
    ]
    assert not (tmp_path / "home").exists()


def test_place_without_a_dataset_is_a_fault(uri):
    (fault,) = data_faults(uri, seq_len=8, vocab_size=257)
    assert f"{uri}/{META_FILE} does not exist" in fault.fact
    with pytest.raises(ConfigError, match="does not exist"):
        meta_at(uri)


def test_store_that_is_away_is_a_fault_in_seconds(uri, meta):
    with exported({"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{free_port()}"}):
        (fault,) = data_faults(uri, seq_len=8, vocab_size=257)
        with pytest.raises(ConfigError, match="EndpointConnectionError"):
            inspect_dataset(uri, is_verified=False, on_shard=lambda *_: None)
    assert "data.path=" in fault.fact and "EndpointConnectionError" in fault.fact


def test_inspection_reads_every_byte_on_request(uri, meta):
    seen = []
    assert inspect_dataset(uri, is_verified=True, on_shard=lambda *at: seen.append(at)) == meta
    assert seen == [(1, 3), (2, 3), (3, 3)]
    _corrupt(uri, "train/000001.arrow")
    with pytest.raises(DataError, match=rf"{uri}/train/000001\.arrow has crc32"):
        inspect_dataset(uri, is_verified=True, on_shard=lambda *_: None)
