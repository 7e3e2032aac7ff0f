"""The S3 store against a real service: its contract, and uploads through the gateway's death."""

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from raymega.checkpoint.format.epochs import read_grant
from raymega.checkpoint.format.manifest import find_restore, list_manifests
from raymega.checkpoint.save.writer import RETRY
from raymega.checkpoint.tools.retention import Pruner, RetentionPolicy
from raymega.errors import LeaseError, StorageError
from raymega.orchestrate.run_store.lease import supports_conditional_put
from raymega.storage.registry import store_faults
from raymega.storage.s3 import S3Store
from tests.support.servers.s3_server import BUCKET, raw_client
from tests.support.store_contract import *  # noqa: F403  # the tests, against the fixture below
from tests.unit.checkpoint.format.test_epochs import save
from tests.unit.checkpoint.large import holds_step, keys_of, save_step
from tests.unit.orchestrate.run_store.test_lease import World

pytestmark = pytest.mark.s3

PART = 5 << 20
MIB = 1 << 20


@pytest.fixture
def prefix():
    return f"p-{uuid4().hex}"


@pytest.fixture
def store(ceph, prefix):
    return S3Store(BUCKET, prefix, part_bytes=PART)


@pytest.fixture
def raw(ceph):
    return raw_client(ceph.endpoint)


def _open_uploads(raw, prefix):
    return raw.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])


class _StoppedError(Exception):
    """What a trainer may raise while it saves."""


@pytest.mark.parametrize("num_bytes", [100, PART + 1, 6 * PART])
def test_failed_put_leaves_nothing_and_keeps_the_old_object(store, raw, prefix, num_bytes):
    store.put("k", [b"old"], overwrite=True)

    def chunks():
        yield os.urandom(num_bytes)
        raise _StoppedError

    for key, overwrite in (("k", True), ("new", False)):
        with pytest.raises(_StoppedError):
            store.put(key, chunks(), overwrite=overwrite)
    assert list(store.list("")) == ["k"] and store.get("k") == b"old"
    assert _open_uploads(raw, prefix) == []


def test_nothing_is_visible_before_the_last_part(store, raw, prefix):
    seen = []

    def chunks():
        for _ in range(4):
            yield os.urandom(PART)
            seen.append((list(store.list("")), len(_open_uploads(raw, prefix))))

    store.put("k", chunks(), overwrite=False)
    assert all(keys == [] for keys, _ in seen) and seen[-1] == ([], 1)
    assert store.size("k") == 4 * PART and _open_uploads(raw, prefix) == []


def _put_as_the_checkpoint_writer_does(store, chunks):
    """A put, and again when the gateway stays away for longer than the client's own retries."""
    for delay_s in RETRY.pauses_s:
        try:
            return store.put("k", chunks(), overwrite=False)
        except StorageError:
            assert list(store.list("")) == [], "a put that failed shows nothing"
            time.sleep(delay_s)
    return store.put("k", chunks(), overwrite=False)


@pytest.mark.wide
def test_upload_finishes_through_a_killed_gateway(ceph, store, raw, prefix, outage, report_rates):
    data = os.urandom(64 * MIB)

    def chunks():
        for start in range(0, len(data), 4 * MIB):
            yield memoryview(data)[start : start + 4 * MIB]
            if start == 32 * MIB:
                outage.begin(ceph.kill_gateway, ceph.start_gateway)

    began = time.monotonic()
    _put_as_the_checkpoint_writer_does(store, chunks)
    report_rates(f"64 MiB through a killed gateway: {time.monotonic() - began:.1f} s")
    assert store.get("k") == data
    assert list(store.list("")) == ["k"] and _open_uploads(raw, prefix) == []


def test_save_is_committed_through_a_killed_gateway(ceph, store, raw, prefix, outage):
    """The gateway dies when the second file begins, and comes back."""
    old = save_step(store, 100)
    put = store.put

    def watched(key, chunks, *, overwrite):
        if key.endswith("-001.safetensors"):
            outage.begin(ceph.kill_gateway, ceph.start_gateway)
        put(key, chunks, overwrite=overwrite)

    store.put = watched
    new = save_step(store, 200)
    assert find_restore(store).manifest == new and holds_step(store, new) and holds_step(store, old)
    store.abort_stale_uploads(timedelta(seconds=-60), now=datetime.now(UTC))
    assert _open_uploads(raw, prefix) == []
    Pruner(store, RetentionPolicy(last=1)).prune()
    assert set(store.list("")) == keys_of(new) and holds_step(store, new)


@pytest.mark.wide
def test_read_finishes_through_a_killed_gateway(ceph, store, outage):
    """It dies when it has begun to answer for the second range."""
    data = os.urandom(64 * MIB)
    store.put("k", [data], overwrite=False)
    get_object, answers = store._client.get_object, []

    def get_and_kill(**names):
        answers.append(get_object(**names))
        if len(answers) == 2:
            outage.begin(ceph.kill_gateway, ceph.start_gateway)
        return answers[-1]

    store._client.get_object = get_and_kill
    assert [store.get("k") == data for _ in range(4)] == [True] * 4


def test_upload_of_a_killed_writer_is_aborted_when_it_is_old(store, raw, prefix):
    target = {"Bucket": BUCKET, "Key": f"{prefix}/torn"}
    upload = raw.create_multipart_upload(**target)
    raw.upload_part(**target, UploadId=upload["UploadId"], PartNumber=1, Body=b"x" * PART)
    (open_upload,) = _open_uploads(raw, prefix)
    begun, day = open_upload["Initiated"], timedelta(hours=24)
    assert store.abort_stale_uploads(day, now=begun + timedelta(hours=23)) == ()
    (gone,) = store.abort_stale_uploads(day, now=begun + timedelta(hours=25))
    assert gone.key == target["Key"] and _open_uploads(raw, prefix) == []
    assert list(store.list("")) == []


def test_two_drivers_at_once_get_two_epochs_and_what_the_older_commits_late_is_none(ceph, prefix):
    for turn in range(5):
        store, ready, leases = S3Store(BUCKET, f"{prefix}/{turn}"), threading.Barrier(2), []
        world = World(store)

        def contend(host, world=world, ready=ready, leases=leases):
            lease = world.lease(host, gone=("a", "b"))
            ready.wait(timeout=200)
            lease.acquire()
            leases.append(lease)

        drivers = [threading.Thread(target=contend, args=(host,)) for host in ("a", "b")]
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join(200)
        older, newer = sorted(leases, key=lambda lease: lease.epoch)
        assert (older.epoch, newer.epoch) == (1, 2)
        for lease in (older, newer):
            assert read_grant(store, lease.epoch).holder == lease.holder
        save(store, older.epoch, 20)
        assert list_manifests(store) == [], "what a stale epoch commits is no checkpoint"
        with pytest.raises(LeaseError, match="epoch 2"):
            older.begin_attempt()
        key = save(store, newer.begin_attempt(), 10)
        assert list_manifests(store) == [key] and find_restore(store).key == key
        assert supports_conditional_put(store)


def test_usable_uri_has_no_fault_and_an_unusable_one_says_why(ceph, raw, prefix):
    assert store_faults(f"s3://{BUCKET}/{prefix}") == []
    assert "Contents" not in raw.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    (fault,) = store_faults("s3://no-such-bucket/runs")
    assert "NoSuchBucket" in fault.fact and ceph.endpoint in fault.fact


@pytest.mark.wide
def test_throughput_is_reported(store, ceph, prefix, report_rates):
    data = os.urandom(256 * MIB)
    large = S3Store(BUCKET, prefix)
    for part in (16, 32):
        writer = S3Store(BUCKET, prefix, part_bytes=part * MIB)
        began = time.monotonic()
        writer.put(f"of-{part}", [data], overwrite=False)
        report_rates(f"write 256 MiB in parts of {part} MiB: {_rate(began)} MB/s")
    began = time.monotonic()
    read = large.get("of-32")
    report_rates(f"read 256 MiB: {_rate(began)} MB/s")
    assert read == data


def _rate(began):
    return f"{256 * MIB / 1e6 / (time.monotonic() - began):.0f}"
