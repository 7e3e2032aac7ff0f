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
from raymega.data.streaming.remote_dataset import meta_at
from raymega.errors import ConfigError, DataError
from raymega.storage.registry import open_store
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
