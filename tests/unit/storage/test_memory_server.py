"""Objects in another process's memory keep to what every store keeps to, over a real connection."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from raymega.errors import StorageError
from raymega.storage import remote_memory_store
from raymega.storage.memory_server import MemoryStoreServer, batch_of
from raymega.storage.remote_memory_store import RemoteMemoryStore
from raymega.storage.shared_memory import SharedMemories
from tests.support.store_contract import *  # noqa: F403
from tests.support.store_contract import put

TOKEN = "secret"


@pytest.fixture
def server():
    with MemoryStoreServer("127.0.0.1", TOKEN) as server:
        yield server


@pytest.fixture
def store(server):
    return RemoteMemoryStore(server.uri, TOKEN, timeout_s=100.0)


def test_large_object_travels_in_pieces_and_any_range_comes_back(store, monkeypatch):
    monkeypatch.setattr(remote_memory_store, "BATCH_BYTES", 1000)
    data = bytes(range(256)) * 40
    sizes = (1, 999, 1000, 1001, 17, 3000)
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    chunks = [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    store.put("big", [*map(memoryview, chunks), data[ends[-1] :]], overwrite=False)
    assert store.get("big") == data and store.size("big") == len(data)
    for start in (0, 1, 998, 1000, 1999, 5000, len(data) - 1, len(data)):
        for num_bytes in (0, 1, 1000, 2500, -1):
            stop = len(data) if num_bytes < 0 else start + num_bytes
            assert store.get("big", start=start, num_bytes=num_bytes) == data[start:stop]


def test_many_objects_are_dropped_in_one_call(store):
    for key in ("a", "b", "c"):
        put(store, key)
    store.drop(["a", "c", "none"])
    assert list(store.list("")) == ["b"]


def test_stranger_can_neither_read_nor_write(server, store):
    put(store, "k")
    stranger = RemoteMemoryStore(server.uri, "guess", timeout_s=100.0)
    uses = (
        lambda: stranger.get("k"),
        lambda: stranger.size("k"),
        lambda: list(stranger.list("")),
        lambda: stranger.delete("k"),
        lambda: put(stranger, "new"),
    )
    for use in uses:
        with pytest.raises(StorageError, match="the token is not this snapshot server's"):
            use()
    assert list(store.list("")) == ["k"]


def test_server_checks_keys_itself(server):
    with pytest.raises(pa.flight.FlightServerError, match="object key"):
        server.do_put(None, pa.flight.FlightDescriptor.for_command(b'{"key": "../up"}'), [], None)


@pytest.mark.parametrize("sent", [b"1234", b"123456"], ids=["short", "long"])
def test_object_of_another_length_than_was_said_is_not_kept(server, store, sent):
    order = pa.flight.FlightDescriptor.for_command(
        b'{"key": "k", "num_bytes": 5, "overwrite": true}'
    )
    pieces = [SimpleNamespace(data=batch_of(pa.py_buffer(sent)))]
    with pytest.raises(pa.flight.FlightServerError, match=f"{len(sent)} bytes came of k, not 5"):
        server.do_put(None, order, pieces, None)
    assert list(store.list("")) == []


def test_server_that_is_gone_is_a_storage_error_in_time():
    with MemoryStoreServer("127.0.0.1", TOKEN) as server:
        store = RemoteMemoryStore(server.uri, TOKEN, timeout_s=100.0)
        put(store, "k")
    for use in (lambda: store.get("k"), lambda: put(store, "k"), lambda: list(store.list(""))):
        with pytest.raises(StorageError, match="a snapshot server must live"):
            use()


def test_end_of_an_object_in_shared_memory_is_seen_where_it_lies(server):
    shared = SharedMemories()
    memory = shared.allocate(10_000)
    memory.pages[:] = bytes(range(250)) * 40
    pages = memoryview(memory.pages)
    store = RemoteMemoryStore(server.uri, TOKEN, timeout_s=100.0, shared=shared)
    store.put("k", [b"head", pages[100:900], pages[900:2000]], overwrite=False)
    data = b"head" + bytes(pages[100:2000])
    assert store.is_sharing and store.size("k") == len(data) and store.get("k") == data
    for start in (0, 3, 4, 5, 1903, 1904, 3000):
        for num_bytes in (0, 1, 2, 7, 5000, -1):
            stop = len(data) if num_bytes < 0 else start + num_bytes
            assert store.get("k", start=start, num_bytes=num_bytes) == data[start:stop]
    memory.pages[100] = 7
    assert store.get("k", start=4, num_bytes=1) == bytes([7]), "no copy was made"
    store.put("gap", [pages[:10], pages[20:30]], overwrite=False)
    store.put("sent", [pages[:10], b"end"], overwrite=False)
    memory.pages[:30] = bytes(30)
    assert store.get("gap") == bytes(range(10)) + bytes(10), "what lies end to end at the end"
    assert store.get("sent") == bytes(range(10)) + b"end"


def test_objects_are_cleared_by_how_their_keys_begin(store):
    for key in ("a/1", "a/12", "b/1"):
        put(store, key)
    store.clear("a/1")
    assert list(store.list("")) == ["b/1"]
