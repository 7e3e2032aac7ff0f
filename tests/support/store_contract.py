"""Tests that every object store must pass; a test module imports them and defines a `store` fixture."""

import threading

import pytest

from raymega.errors import StorageError
from raymega.storage.store import delete_all, folders_below, sizes_below


def put(store, key, data=b"data", *, overwrite=False):
    store.put(key, [data], overwrite=overwrite)


def test_object_reads_back_whole_and_by_range(store):
    store.put("a/b.bin", [b"0123", b"", memoryview(b"456789")], overwrite=False)
    assert store.get("a/b.bin") == b"0123456789"
    assert store.get("a/b.bin", start=3, num_bytes=4) == b"3456"
    assert store.get("a/b.bin", start=8) == b"89"
    assert store.get("a/b.bin", start=8, num_bytes=9) == b"89"
    assert store.get("a/b.bin", start=10) == store.get("a/b.bin", start=99, num_bytes=1) == b""
    assert store.get("a/b.bin", num_bytes=0) == b""
    assert store.size("a/b.bin") == 10


def test_empty_object_exists(store):
    store.put("empty", [], overwrite=False)
    assert store.get("empty") == b"" and store.size("empty") == 0
    assert list(store.list("")) == ["empty"]


def test_put_refuses_a_taken_key_unless_told(store):
    put(store, "k", b"first")
    with pytest.raises(FileExistsError):
        put(store, "k", b"second")
    assert store.get("k") == b"first"
    put(store, "k", b"third", overwrite=True)
    assert store.get("k") == b"third"


def test_one_of_many_writers_gets_a_key(store):
    put(store, "other")  # whatever a store makes at its first use
    won, lost = [], []

    def write(name):
        try:
            put(store, "k", name)
            won.append(name)
        except FileExistsError:
            lost.append(name)

    threads = [threading.Thread(target=write, args=(b"%d" % i,)) for i in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(won) == 1 and len(lost) == 5
    # what is there is the winner's, whole
    assert store.get("k") == won[0]


def test_list_gives_keys_by_prefix_in_order(store):
    for key in ("b/x", "a/y", "a-1", "a/x/deep", "ab"):
        put(store, key)
    assert list(store.list("")) == ["a-1", "a/x/deep", "a/y", "ab", "b/x"]
    assert list(store.list("a")) == ["a-1", "a/x/deep", "a/y", "ab"]
    assert list(store.list("a/")) == ["a/x/deep", "a/y"]
    assert list(store.list("none/")) == []


def test_missing_object_is_a_key_error_and_deletes_quietly(store):
    put(store, "folder/file")
    for key in ("absent", "folder", "folder/file/below"):
        for read in (store.get, store.size, lambda key: store.get(key, num_bytes=0)):
            with pytest.raises(KeyError):
                read(key)
    for key in ("absent", "folder/file/below", "folder/file"):
        store.delete(key)
    assert list(store.list("")) == []


@pytest.mark.parametrize(
    "key", ["", "/abs", "../up", "a/../../up", "a//b", ".hidden", "a/.b", "-x"]
)
def test_key_cannot_leave_the_root(store, key):
    for use in (lambda: put(store, key), lambda: store.delete(key)):
        with pytest.raises(StorageError, match="object key"):
            use()


def test_sizes_of_many_objects_are_those_of_each(store):
    for number in range(3):
        put(store, f"a/{number}", b"x" * number)
    put(store, "ab", b"other")
    found = sizes_below(store, "a/", ["a/0", "a/1", "a/2", "a/absent"])
    assert {key: found.get(key) for key in ("a/0", "a/1", "a/2", "a/absent")} == {
        "a/0": 0, "a/1": 1, "a/2": 2, "a/absent": None,
    }  # fmt: skip


def test_folders_are_the_names_below_a_prefix(store):
    for key in ("a/x/1", "a/x/2", "a/y/z/3", "a/file", "b/1", "ab/1"):
        put(store, key)
    assert list(folders_below(store, "a/")) == ["x", "y"]
    assert list(folders_below(store, "")) == ["a", "ab", "b"]
    assert list(folders_below(store, "none/")) == []


def test_many_objects_are_deleted_and_no_other(store):
    for number in range(5):
        put(store, f"a/{number}")
    delete_all(store, ["a/1", "a/absent", "a/3"])
    delete_all(store, [])
    assert list(store.list("")) == ["a/0", "a/2", "a/4"]
