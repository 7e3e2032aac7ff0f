"""SIGKILL at every stage of a save, in a folder and in an object store: what a restart finds, and that
the next attempt leaves no rest behind."""

import os
import signal
import threading
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from uuid import uuid4

import pytest
from botocore.awsrequest import AWSHTTPConnection

from raymega.checkpoint.format.keys import is_manifest
from raymega.checkpoint.format.manifest import commit, find_restore
from raymega.checkpoint.save.writer import SaveLimits
from raymega.checkpoint.tools.retention import Pruner, RetentionPolicy
from raymega.storage import local
from raymega.storage.local import PARTIAL_FOLDER, LocalStore
from raymega.storage.s3 import S3Store
from tests.support.ranks import RankFailureError, run_alone
from tests.support.servers.s3_server import BUCKET, environment, exported, moto_server, raw_client
from tests.unit.checkpoint.large import (
    PART,
    holds_step,
    keys_of,
    make_manifest,
    save_step,
    write_step,
)

pytestmark = pytest.mark.dist

NUM_FILES = 2
FILES = SaveLimits(file_bytes=13 << 20)
"""The first file has three parts: an upload begins when two are there."""
STAGES = (
    "before-the-first-byte",
    *(f"within-file-{number}" for number in range(1, NUM_FILES + 1)),
    *(f"after-file-{number}" for number in range(1, NUM_FILES)),
    "before-the-manifest",
    "within-the-manifest",
    "after-the-manifest",
    "while-old-ones-are-deleted",
)
COMMITTED = {"after-the-manifest", "while-old-ones-are-deleted"}


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _send_half_and_die(connection, data):
    """Of the body; what has no body, and every head, goes out whole."""
    is_head = isinstance(data, bytes) and b" HTTP/1.1\r\n" in data
    if is_head:
        return HTTPConnection.send(connection, data)
    data = data if isinstance(data, bytes) else data.read()
    HTTPConnection.send(connection, data[: len(data) // 2])
    return _die()


class DyingStore:
    """A store whose process is killed at one stage of a save."""

    def __init__(self, store, stage):
        self._store, self._stage = store, stage
        self._lock, self._num_done, self._num_deleted = threading.Lock(), 0, 0
        self.uri = store.uri

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, chunks, *, overwrite):
        if is_manifest(key):
            return self._put_manifest(key, chunks, overwrite=overwrite)
        number = 2 if key.endswith("-001.safetensors") else 1
        if self._stage == "before-the-first-byte":
            _die()
        chunks = self._torn(chunks) if self._stage == f"within-file-{number}" else chunks
        self._store.put(key, chunks, overwrite=overwrite)
        with self._lock:
            self._num_done += 1
            if self._stage == f"after-file-{self._num_done}":
                _die()
        return None

    def delete(self, key):
        self._store.delete(key)
        self._num_deleted += 1
        if self._stage == "while-old-ones-are-deleted" and self._num_deleted == 2:
            _die()

    def delete_many(self, keys):
        """Killed when a service has carried out a part of the request."""
        for key in keys:
            self.delete(key)

    def _torn(self, chunks):
        """Killed at the end: of a file of several parts, an upload has begun."""
        chunks, passed = list(chunks), 0
        for chunk in chunks:
            yield chunk
            passed += len(chunk)
            if passed == sum(map(len, chunks)):
                _die()

    def _put_manifest(self, key, chunks, *, overwrite):
        if self._stage == "before-the-manifest":
            _die()
        if self._stage == "within-the-manifest":
            if isinstance(self._store, LocalStore):
                write = local._write_all
                local._write_all = lambda handle, rest: (
                    write(handle, rest[: len(rest) // 2]),
                    _die(),
                )
            else:
                AWSHTTPConnection.send = _send_half_and_die
        self._store.put(key, chunks, overwrite=overwrite)
        _die()


def _open(place):
    folder, prefix = place
    return S3Store(BUCKET, prefix, part_bytes=PART) if prefix else LocalStore(folder)


def _save_and_die(place, stage, env):
    with exported(env):
        store = _open(place)
        save_step(store, 100, limits=FILES)
        dying = DyingStore(store, stage)
        manifest = make_manifest(write_step(dying, 200, limits=FILES))
        if stage == "while-old-ones-are-deleted":
            commit(store, manifest)
            Pruner(dying, RetentionPolicy(last=1)).prune()
        else:
            commit(dying, manifest)


@pytest.fixture(scope="module")
def service():
    with moto_server() as endpoint, exported(environment(endpoint)):
        yield endpoint


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path, service):
    return (tmp_path, f"p-{uuid4().hex}" if request.param == "s3" else "")


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", STAGES)
def test_killed_save_loses_nothing_committed_and_leaves_nothing_for_good(place, service, stage):
    with pytest.raises(RankFailureError, match=r"exit code -9|SIGKILL"):
        run_alone(_save_and_die, place, stage, environment(service))
    store = _open(place)
    found = find_restore(store)
    assert found.broken == ()
    assert found.manifest.step == (200 if stage in COMMITTED else 100)
    assert holds_step(store, found.manifest)

    if place[1] and stage == "within-file-1":
        assert _open_uploads(place, service), "parts were on their way"

    new = save_step(store, 300, attempt=2, limits=FILES)
    assert len(new.file_sizes()) == NUM_FILES
    Pruner(store, RetentionPolicy(last=1)).prune()
    assert set(store.list("")) == keys_of(new) and holds_step(store, new)
    _collect(store, place, service)
    assert holds_step(store, new)


def _open_uploads(place, service):
    answer = raw_client(service).list_multipart_uploads(Bucket=BUCKET, Prefix=place[1])
    return answer.get("Uploads", [])


def _collect(store, place, service):
    """A day later: unfinished uploads are aborted, unfinished files go with the next write."""
    folder, prefix = place
    if prefix:
        store.abort_stale_uploads(timedelta(days=1), now=datetime.now(UTC))
        assert _open_uploads(place, service) == []
        return
    for rest in (folder / PARTIAL_FOLDER).iterdir():
        os.utime(rest, (0, 0))
    # the next process, whose first write looks for what is left
    _open(place).put("next", [b"x"], overwrite=True)
    assert list((folder / PARTIAL_FOLDER).iterdir()) == []
