"""The S3 store against a second real service, OpenStack Swift: its contract, and servers that die."""

import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest

from raymega.checkpoint.format.manifest import find_restore
from raymega.checkpoint.tools.retention import Pruner, RetentionPolicy
from raymega.storage.s3 import S3Store
from tests.support.servers.s3_server import BUCKET, raw_client
from tests.support.store_contract import *  # noqa: F403  # the tests, against the fixture below
from tests.support.store_contract import put
from tests.unit.checkpoint.large import holds_step, keys_of, save_step, write_step

pytestmark = pytest.mark.s3

PART = 5 << 20


@pytest.fixture
def prefix():
    return f"p-{uuid4().hex}"


@pytest.fixture
def store(swift, prefix):
    return S3Store(BUCKET, prefix, part_bytes=PART)


@pytest.fixture
def raw(swift):
    return raw_client(swift.endpoint, *swift.keys)


def _open_uploads(raw, prefix):
    return raw.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])


def test_one_of_many_writers_gets_a_key(store):
    """Swift looks before it writes, so several may win: why a lease does not rest on it. None is torn."""
    won = []

    def write(name):
        try:
            put(store, "k", name)
            won.append(name)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=write, args=(b"%d" % i,)) for i in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert store.get("k") in won
    with pytest.raises(FileExistsError):
        put(store, "k", b"late")


def _kills_at(store, file, kill):
    """``store``, which calls ``kill`` when the data file of that number begins."""
    was_put = store.put

    def put(key, chunks, *, overwrite):
        if key.endswith(f"-{file:03d}.safetensors"):
            kill()
        was_put(key, chunks, overwrite=overwrite)

    store.put = put
    return store


@pytest.mark.sample(1)
@pytest.mark.parametrize("server", ["proxy", "object"])
def test_save_is_committed_through_a_killed_server(swift, store, raw, prefix, outage, server):
    old = save_step(store, 100)

    def kill():
        outage.begin(lambda: swift.kill(server), lambda: swift.start_one(server))

    new = save_step(_kills_at(store, 1, kill), 200)
    found = S3Store(BUCKET, prefix, part_bytes=PART)
    assert find_restore(found).manifest == new and holds_step(found, new) and holds_step(found, old)
    found.abort_stale_uploads(timedelta(seconds=-60), now=datetime.now(UTC))
    assert _open_uploads(raw, prefix) == []
    Pruner(found, RetentionPolicy(last=1)).prune()
    assert set(found.list("")) == keys_of(new) and holds_step(found, new)


@pytest.mark.wide
def test_save_that_fails_keeps_the_one_before(swift, store, prefix, monkeypatch):
    """The object server is away for good: the save is reported as failed, the older one is chosen."""
    old = save_step(store, 100)
    dead = []

    def kill():
        if not dead:
            dead.append(swift.kill("object"))

    with monkeypatch.context() as at_once:
        at_once.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _seconds: None))
        shard = write_step(_kills_at(store, 1, kill), 200)
    assert shard.error.startswith("StorageError") and shard.boxes == ()
    swift.start_one("object")
    found = S3Store(BUCKET, prefix, part_bytes=PART)
    assert find_restore(found).manifest == old and holds_step(found, old)
