"""Datasets in an object store: the driver's questions, and how they are opened."""

from dataclasses import replace
from uuid import uuid4

import numpy as np
import pytest

from raymega.data.arrow import ShardWriter
from raymega.data.checks import data_faults
from raymega.data.format import META_FILE, ImageMeta, SplitMeta, encode_meta
from raymega.data.inspect import inspect_dataset
from raymega.data.open_split import Shape, open_split
from raymega.data.samples import known_datasets
from raymega.data.streaming import remote_dataset
from raymega.data.streaming.fetcher import Fetcher
from raymega.data.streaming.remote_dataset import (
    description_digest,
    meta_at,
    open_files,
    read_descriptions,
)
from raymega.errors import ConfigError, DataError
from raymega.plan.run_plan import read_plan
from raymega.storage.registry import open_store
from raymega.storage.s3 import S3Store
from tests.support.jobs import make_test_plan
from tests.support.servers.ports import CLOSED_PORT
from tests.support.servers.s3_server import BUCKET, environment, exported, moto_server
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


def _corrupt(uri, file):
    content = bytearray(open_store(uri).get(file))
    content[200] ^= 1
    open_store(uri).put(file, [bytes(content)], overwrite=True)


def test_split_opens_from_a_store_with_the_same_tokens(uri, meta, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    far = open_split(uri, "train", Shape(seq_len=16), seed=0)
    near = open_split(str(tmp_path / "made"), "train", Shape(seq_len=16), seed=0)
    assert far.num_windows == near.num_windows == 4
    assert all((far.window(i) == near.window(i)).all() for i in range(3))
    (file,) = (tmp_path / "home/.raymega/cache").rglob("*.arrow")
    assert file.name == "000000.arrow" and meta_at(uri) == meta


def test_another_dataset_under_the_same_uri_has_files_of_its_own(uri, meta, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_split(uri, "train", Shape(seq_len=16), seed=0).window(0)[0] == 0
    other = tmp_path / "other"
    write_dataset(other, train=(33,), first=100)
    for path in other.rglob("*.*"):
        key = path.relative_to(other).as_posix()
        open_store(uri).put(key, [path.read_bytes()], overwrite=True)
    assert open_split(uri, "train", Shape(seq_len=16), seed=0).window(0)[0] == 100


def test_driver_is_told_everything_without_a_copy(uri, meta, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_faults(uri, seq_len=8, vocab_size=257, splits=("train", "valid")) == []
    open_store(uri).delete("train/000001.arrow")
    faults = data_faults(uri, seq_len=20, vocab_size=256, splits=("train", "valid"))
    texts = [fault.fact for fault in faults]
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
    with exported({"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{CLOSED_PORT}"}):
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


def test_pixels_come_from_a_store_with_their_tokens(uri, meta, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    size, num_patches, random = 8, 4, np.random.default_rng(0)
    pictures = [random.integers(256, size=(3, size, size), dtype=np.uint8) for _ in range(5)]
    # two shards of documents of 12 tokens, whose images begin at token 2 and, of some, at 6
    folder, shards, left = tmp_path / "seen", [], iter(pictures)
    for shard, counts in enumerate([(1, 2), (2,)]):
        with ShardWriter(folder, f"train/{shard}.arrow", dtype="uint16", has_images=True) as writer:
            for count in counts:
                images = [(2 + 4 * at, next(left).tobytes()) for at in range(count)]
                writer.append(np.arange(12, dtype=np.uint16), None, images)
            shards.append(writer.close())
    images = ImageMeta(size=size, num_patches=num_patches, token_id=256)
    split = SplitMeta(shards=tuple(shards), num_text_bytes=36)
    seen = replace(meta, splits={"train": split}, images=images)
    (folder / META_FILE).write_bytes(encode_meta(seen))
    for path in folder.rglob("*.*"):
        key = path.relative_to(folder).as_posix()
        open_store(f"{uri}/seen").put(key, [path.read_bytes()], overwrite=False)
    # the last window of a shard would lack a label
    for packing, count in (("none", 1), ("best_fit", 5)):
        shape = Shape(seq_len=12, packing=packing, window=3, multiple=4)
        far, near = (open_split(at, "train", shape, seed=0) for at in (f"{uri}/seen", str(folder)))
        found = []
        for index in range(near.num_windows):
            here, there = near.row(index), far.row(index)
            assert (here.tokens == there.tokens).all()
            assert (here.image_places == there.image_places).all()
            for one, other in zip(here.images, there.images, strict=True):
                assert (one() == other()).all()
            found += [image().tobytes() for image in there.images]
        assert sorted(found) == sorted(each.tobytes() for each in pictures[:count])


@pytest.fixture
def requests(monkeypatch):
    """Keys that stores were asked for."""
    found, get = [], S3Store.get

    def noted(store, key, **part):
        found.append(key)
        return get(store, key, **part)

    monkeypatch.setattr(S3Store, "get", noted)
    return found


def _forget():
    """Be another process of the node."""
    remote_dataset._kept.cache_clear()


def test_rank_opens_what_its_driver_knows_without_a_store(uri, meta, tmp_path, requests):
    """A spare that was loaded ahead, a survivor, and a new process on a node that has had one."""
    known, shape = {uri: description_digest(uri)}, Shape(seq_len=16)
    requests.clear()
    read_descriptions(known, root=tmp_path)
    assert requests == [META_FILE]
    fetcher = Fetcher(limit_bytes=1 << 20, root=tmp_path, known=known)
    first = open_split(uri, "train", shape, seed=0, fetcher=fetcher).window(0)
    open_split(uri, "valid", shape, seed=0, fetcher=fetcher)
    assert requests == [META_FILE, "train/000000.arrow"]
    for forget in (lambda: None, _forget):
        forget()
        again = Fetcher(limit_bytes=1 << 20, root=tmp_path, known=known)
        found = open_split(uri, "train", shape, seed=0, fetcher=again)
        assert (found.window(0) == first).all()
    assert requests == [META_FILE, "train/000000.arrow"]


def test_copy_of_a_description_that_the_disk_damaged_is_read_anew(uri, meta, tmp_path, requests):
    known = {uri: description_digest(uri)}
    read_descriptions(known, root=tmp_path)
    copy = tmp_path / known[uri] / META_FILE
    copy.write_bytes(copy.read_bytes()[:-9])
    _forget()
    requests.clear()
    fetcher = Fetcher(limit_bytes=1 << 20, root=tmp_path, known=known)
    assert open_files(uri, fetcher)[0] == meta and requests == [META_FILE]
    assert description_digest(uri) == known[uri] == remote_dataset._digest(copy.read_bytes())


def test_dataset_that_changed_after_the_driver_began_is_refused(uri, meta, tmp_path):
    known = {uri: description_digest(uri)}
    write_dataset(tmp_path / "other", train=(33,), first=100)
    content = (tmp_path / "other" / META_FILE).read_bytes()
    open_store(uri).put(META_FILE, [content], overwrite=True)
    with pytest.raises(DataError, match=rf"{META_FILE} has digest .* it had {known[uri]}"):
        open_files(uri, Fetcher(limit_bytes=1 << 20, root=tmp_path, known=known))


def test_lengths_of_documents_are_read_once_a_node(uri, meta, tmp_path, monkeypatch, requests):
    """Also those of few documents: the shards that hold them may be large, and are gone from the cache by then."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shape = Shape(seq_len=16, packing="best_fit", window=8)
    lengths = []
    for _ in range(2):
        lengths.append(open_split(uri, "train", shape, seed=0).documents.lengths.tolist())
        for path in (tmp_path / "home").rglob("*.arrow"):
            path.unlink()
    assert lengths[0] == lengths[1]
    assert sorted(requests) == [META_FILE] * 2 + ["train/000000.arrow", "train/000001.arrow"]


def test_driver_tells_of_datasets_in_stores_alone(uri, meta):
    plan = make_test_plan(f"data.path={uri}")
    assert known_datasets(make_test_plan().job) == {}
    assert known_datasets(plan.job) == {uri: description_digest(uri)}
    told = replace(plan, datasets=known_datasets(plan.job))
    assert read_plan(told.to_json()).datasets == told.datasets and told == plan
