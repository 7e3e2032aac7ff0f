"""Both stores keep one contract; the local one also through crashes and refusals of the disk."""

import os

import pytest

from raymega.errors import StorageError
from raymega.storage import local
from raymega.storage.local import PARTIAL_FOLDER, LocalStore
from tests.support.memory_store import MemoryStore
from tests.support.store_contract import *  # noqa: F403  # the tests, against the fixture below


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return LocalStore(tmp_path / "root") if request.param == "local" else MemoryStore()


@pytest.fixture
def files(tmp_path):
    return LocalStore(tmp_path / "root")


def _put(store, key, data=b"data", *, overwrite=False):
    store.put(key, [data], overwrite=overwrite)


def test_delete_removes_emptied_folders_but_not_the_root(files, tmp_path):
    _put(files, "a/b/one")
    _put(files, "a/two")
    files.delete("a/b/one")
    assert not (tmp_path / "root/a/b").exists() and list(files.list("")) == ["a/two"]
    files.delete("a/two")
    assert (tmp_path / "root").is_dir() and not (tmp_path / "root/a").exists()


def test_folder_that_another_process_leaves_empty_meanwhile_is_made_again(files, monkeypatch):
    """Nodes write their probes and delete them in one folder: a put failed when the last one there was deleted."""
    _put(files, "a/b/one")
    make = local._make_folder

    def make_and_lose(folder):
        make(folder)
        if folder.name == "b":
            files.delete("a/b/one")  # the last one: its folders go, too

    monkeypatch.setattr(local, "_make_folder", make_and_lose)
    _put(files, "a/b/two")
    assert files.get("a/b/two") == b"data" and list(files.list("")) == ["a/b/two"]


def test_listing_of_a_prefix_looks_at_no_folder_beside_it(files, monkeypatch):
    """A list of runs asked each for run.json and metrics, and walked through all of its checkpoints for it."""
    for key in ("run.json", "runs/x", "checkpoints/step-00000001/a", "metrics.jsonl"):
        _put(files, key)
    looked, walk = [], os.walk
    monkeypatch.setattr(
        local.os, "walk",
        lambda *args, **more: (at for at in walk(*args, **more) if looked.append(at[0]) is None),
    )  # fmt: skip
    assert list(files.list("run")) == ["run.json", "runs/x"]
    assert len(looked) == 2
    assert list(files.list("checkpoints/st")) == ["checkpoints/step-00000001/a"]


def test_failed_put_leaves_nothing_and_keeps_the_old_object(files, tmp_path):
    _put(files, "k", b"old")

    def chunks():
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        files.put("k", chunks(), overwrite=True)
    assert files.get("k") == b"old"
    assert list((tmp_path / "root" / PARTIAL_FOLDER).iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_object_is_synced_before_it_has_its_name(files, monkeypatch, overwrite):
    calls = []
    fsync, publish, sync_folder = os.fsync, local._publish, local._sync_folder

    def note(name, real):
        return lambda *args, **kwargs: (calls.append(name), real(*args, **kwargs))[1]

    _put(files, "folder/other")
    monkeypatch.setattr(local, "_publish", note("name", publish))
    monkeypatch.setattr(local, "_sync_folder", note("sync folder", sync_folder))
    monkeypatch.setattr(os, "fsync", note("sync", fsync))
    _put(files, "folder/k", overwrite=overwrite)
    assert calls == ["sync", "name", "sync folder", "sync"]


def test_partial_object_of_a_killed_writer_is_invisible_and_goes_after_a_day(
    files, tmp_path, monkeypatch
):
    _put(files, "k")
    partials = tmp_path / "root" / PARTIAL_FOLDER
    old, young = partials / "old", partials / "young"
    old.write_bytes(b"torn")
    young.write_bytes(b"torn")
    day_ago = young.stat().st_mtime - local.STALE_PARTIAL_S - 60
    os.utime(old, (day_ago, day_ago))
    assert list(files.list("")) == ["k"]
    # a look an hour: ranks that save together do not look at each other's files at each put
    _put(files, "soon")
    assert {*partials.iterdir()} == {old, young}
    monkeypatch.setattr(local.time, "monotonic", lambda: 1e9 + local.LOOK_EVERY_S)
    _put(files, "other")
    assert list(partials.iterdir()) == [young]


def test_large_write_goes_on_after_a_short_one(files, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:3]))
    _put(files, "k", b"0123456789")
    monkeypatch.undo()
    assert files.get("k") == b"0123456789"


def test_file_in_the_place_of_a_folder_is_a_storage_error(files):
    _put(files, "k")
    with pytest.raises(StorageError, match=r"could not write .*k/below"):
        _put(files, "k/below")


def test_bytes_come_to_their_place_in_pieces_and_end_where_the_object_does(files):
    data = bytes(range(250))
    _put(files, "k", data)
    for start, room, wanted in ((0, 250, 250), (10, 100, 100), (200, 100, 50), (300, 10, 0)):
        place = memoryview(bytearray(room))
        pieces = list(files.read_into("k", place, start=start, piece_bytes=64))
        assert b"".join(pieces) == data[start : start + wanted] == place[:wanted]
        assert all(len(piece) <= 64 for piece in pieces)
    with pytest.raises(KeyError):
        list(files.read_into("none", memoryview(bytearray(1)), start=0, piece_bytes=64))
    with pytest.raises(StorageError, match="object key"):
        list(files.read_into("../up", memoryview(bytearray(1)), start=0, piece_bytes=64))
