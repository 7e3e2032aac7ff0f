"""Requests for saved boxes: how many, how long, how many at once, and what goes wrong with one."""

import threading
from dataclasses import replace
from zlib import crc32

import pytest

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.load import ranged_reads
from raymega.checkpoint.load.ranged_reads import fetch, plan_requests
from raymega.errors import CheckpointError, StorageError
from tests.support.memory_store import MemoryStore

DATA = bytes(range(256)) * 8


def make_box(start, num_bytes, *, file="a0001-rank00000.safetensors"):
    return SavedBox(
        tensor="model/w", dtype="float32", global_shape=(1,), box=Box(offset=(0,), shape=(1,)),
        file=file, start=start, num_bytes=num_bytes, crc32=crc32(DATA[start : start + num_bytes]),
    )  # fmt: skip


def make_manifest(boxes):
    return Manifest(step=1, attempt=1, created="", state={}, job={}, grid={}, boxes=tuple(boxes))


class SlowStore(MemoryStore):
    """Knows how many gets were under way at once, and lets none end before ``meet`` are."""

    def __init__(self, meet=1):
        super().__init__()
        self.gets, self.barrier = [], threading.Barrier(meet)

    def get(self, key, *, start=0, num_bytes=-1):
        self.gets.append((key, start, num_bytes))
        self.barrier.wait(timeout=100)
        return super().get(key, start=start, num_bytes=num_bytes)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(ranged_reads, "LOCAL_BYTES", 100)
    monkeypatch.setattr(ranged_reads, "GAP_BYTES", 8)


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        ([(0, 40), (40, 60)], [(0, 100)]),
        ([(0, 40), (40, 61)], [(0, 40), (40, 61)]),
        ([(0, 10), (18, 10)], [(0, 28)]),
        ([(0, 10), (19, 10)], [(0, 10), (19, 10)]),
        ([(20, 10), (0, 20)], [(0, 30)]),
        ([(0, 10), (10, 10), (20, 10), (38, 4)], [(0, 42)]),
        ([(0, 500), (500, 4)], [(0, 500), (500, 4)]),
        ([], []),
    ],
    ids=["full", "too long", "gap", "wide gap", "any order", "several", "one long box", "nothing"],
)
def test_neighbours_travel_together(spans, wanted):
    boxes = [make_box(*span) for span in spans]
    requests = plan_requests(make_manifest(boxes), boxes, 100)
    assert [(at.start, at.num_bytes) for at in requests] == wanted
    assert sorted(box.start for at in requests for box in at.boxes) == sorted(s for s, _ in spans)


def test_files_are_apart():
    boxes = [make_box(0, 10, file=f"a0001-rank0000{i}.safetensors") for i in (0, 1)]
    assert len(plan_requests(make_manifest(boxes), boxes, 100)) == 2


def test_bytes_of_several_names_are_read_once_however_long():
    boxes = [replace(make_box(0, 500), tensor=f"model/experts.{i}") for i in range(3)]
    (request,) = plan_requests(make_manifest(boxes), boxes, 100)
    assert (request.start, request.num_bytes) == (0, 500)
    assert request.boxes == tuple(boxes)


def put_data(store, manifest):
    for key in manifest.file_sizes():
        store.put(key, [DATA], overwrite=True)


def test_every_box_comes_once_with_its_bytes_from_several_requests_at_once():
    boxes = [make_box(start, 50) for start in range(0, 600, 100)]
    manifest, store = make_manifest(boxes), SlowStore(meet=3)
    put_data(store, manifest)
    seen = []
    num_bytes = fetch(
        store, manifest, boxes, lambda box, _, data: seen.append((box.start, bytes(data))), num_fetches=3
    )  # fmt: skip
    assert sorted(seen) == [(box.start, DATA[box.start : box.start + 50]) for box in boxes]
    assert num_bytes == 300 and len(store.gets) == 6


def test_one_fetch_at_once_stays_in_the_thread():
    boxes = [make_box(start, 50) for start in (0, 200)]
    manifest, store, threads = make_manifest(boxes), SlowStore(), set()
    put_data(store, manifest)
    fetch(store, manifest, boxes, lambda *_: threads.add(threading.get_ident()), num_fetches=1)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("num_fetches", [1, 3])
def test_nothing_is_used_of_a_box_that_is_not_as_it_was_written(num_fetches):
    boxes = [make_box(start, 50) for start in range(0, 600, 100)]
    boxes[2] = replace(boxes[2], crc32=7)
    manifest, store, used = make_manifest(boxes), SlowStore(), []
    put_data(store, manifest)
    with pytest.raises(CheckpointError, match=r"bytes 200 to 250 .*crc32"):
        fetch(store, manifest, boxes, lambda box, *_: used.append(box.start), num_fetches=num_fetches)  # fmt: skip
    assert 200 not in used
    assert not [at for at in threading.enumerate() if at.name.startswith("fetch")]


def make_matrix(rows, columns):
    """A box of float32 rows, wherever in its tensor."""
    num_bytes = 4 * rows * columns
    shape = (100, columns)
    return replace(
        make_box(64, num_bytes), global_shape=shape, box=Box(offset=(7, 0), shape=(rows, columns))
    )


@pytest.mark.parametrize("columns", [5, 10, 40], ids=["rows", "few rows", "a row too long"])
def test_long_box_comes_in_rows(columns):
    box = make_matrix(12, columns)
    manifest, store, seen = make_manifest([box]), SlowStore(), []
    put_data(store, manifest)
    fetch(store, manifest, [box], lambda _, part, data: seen.append((part, bytes(data))))
    assert b"".join(data for _, data in seen) == DATA[64 : 64 + box.num_bytes]
    assert [part.offset[0] for part, _ in seen] == sorted({part.offset[0] for part, _ in seen})
    assert sum(part.shape[0] for part, _ in seen) == 12 and seen[0][0].offset == (7, 0)
    assert max(n for _, _, n in store.gets) <= max(100, 4 * columns)
    assert all(len(data) == 4 * part.num_elements for part, data in seen)


@pytest.mark.parametrize("damage", ["flipped", "torn"])
def test_long_box_that_is_not_as_it_was_written_is_refused_at_its_end(damage):
    box = make_matrix(12, 10)
    manifest, store = make_manifest([box]), SlowStore()
    data = bytearray(DATA)
    data[400] ^= 1
    key = manifest.file_key(box)
    store.put(key, [data if damage == "flipped" else DATA[:400]], overwrite=True)
    with pytest.raises(CheckpointError, match="crc32" if damage == "flipped" else "only 336 bytes"):
        fetch(store, manifest, [box], lambda *_: None)


def test_object_store_is_asked_for_more_at_once(monkeypatch):
    monkeypatch.setattr(ranged_reads, "REMOTE_BYTES", 200)
    monkeypatch.setattr(SlowStore, "uri", "s3://bucket/run")
    box = make_matrix(12, 10)
    manifest, store = make_manifest([box]), SlowStore()
    put_data(store, manifest)
    fetch(store, manifest, [box], lambda *_: None)
    assert [n for _, _, n in store.gets] == [200, 200, 80]


def test_missing_file_is_named_and_a_failing_store_says_why():
    boxes = [make_box(0, 50), make_box(300, 50)]
    manifest = make_manifest(boxes)
    with pytest.raises(CheckpointError, match=r"a0001-rank00000.safetensors.*file is missing"):
        fetch(MemoryStore(), manifest, boxes, lambda *_: None)

    class Broken(MemoryStore):
        def get(self, key, *, start=0, num_bytes=-1):
            raise StorageError("the disk is on fire")

    with pytest.raises(StorageError, match="on fire"):
        fetch(Broken(), manifest, boxes, lambda *_: None)
