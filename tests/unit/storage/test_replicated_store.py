"""ReplicatedStore: a write that survives a lost store, and a read that finds whoever has the object."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from raymega.errors import StorageError
from raymega.storage.replicated_store import ReplicatedStore
from tests.support.memory_store import MemoryStore
from tests.support.store_contract import *  # noqa: F403
from tests.support.store_contract import put


class Lost(MemoryStore):
    """Serves nothing; counts how often it was asked."""

    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def _refuse(self, *_args, **_kwargs):
        self.num_calls += 1
        raise StorageError("gone")

    put = get = size = list = delete = _refuse


@pytest.fixture
def store():
    return ReplicatedStore({"a": MemoryStore(), "b": MemoryStore()})


def test_write_goes_to_all_and_one_is_enough_to_read():
    stores = {"a": MemoryStore(), "b": MemoryStore()}
    put(ReplicatedStore(stores), "k")
    for name in stores:
        assert ReplicatedStore({name: stores[name]}).get("k") == b"data"


def test_store_that_fails_a_write_is_not_asked_again():
    lost, living = Lost(), MemoryStore()
    copies = ReplicatedStore({"a": lost, "b": living})
    for key in ("one", "two"):
        put(copies, key)
    assert lost.num_calls == 1 and copies.num_stores == 1
    assert list(living.list("")) == ["one", "two"]


def test_two_writes_that_lose_the_same_store_both_go_on():
    """A rank writes two files at once."""
    both_asked, living = Barrier(2, timeout=100), MemoryStore()

    class LostToBoth(Lost):
        def put(self, *args, **kwargs):
            both_asked.wait()
            self._refuse()

    copies = ReplicatedStore({"a": LostToBoth(), "b": living})
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(put, copies, key) for key in ("one", "two")]:
            done.result()
    assert copies.num_stores == 1 and list(living.list("")) == ["one", "two"]


def test_write_that_nobody_takes_fails():
    copies = ReplicatedStore({"a": Lost()})
    for _ in range(2):
        with pytest.raises(StorageError, match="no copy is left"):
            put(copies, "k")


def test_read_passes_over_the_lost_and_over_those_without():
    empty, full = MemoryStore(), MemoryStore()
    put(full, "k")
    copies = ReplicatedStore({"lost": Lost(), "empty": empty, "full": full})
    assert copies.get("k") == b"data" and copies.size("k") == 4
    with pytest.raises(StorageError, match="gone"):
        copies.get("absent")


def test_read_begins_with_the_copy_that_it_is_told():
    stores = {"a": MemoryStore(), "b": MemoryStore(), "c": MemoryStore()}
    for name, store in stores.items():
        put(store, "k", name.encode())
    holders = {"k": ("c", "a")}
    got = [ReplicatedStore(stores, holders=holders, first=first).get("k") for first in range(4)]
    assert got == [b"c", b"a", b"c", b"a"]
    with pytest.raises(KeyError):
        ReplicatedStore(stores, holders=holders).get("unknown")
