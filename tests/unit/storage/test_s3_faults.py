"""Saves through a service that throttles, stalls, hangs up, or does its work and does not say so."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest

from raymega.checkpoint.format.manifest import commit, find_restore
from raymega.checkpoint.tools.retention import Pruner, RetentionPolicy
from raymega.errors import StorageError
from raymega.storage import s3
from raymega.storage.s3 import S3Store
from tests.support.servers.s3_faults import KINDS, STAGES, faulty_service
from tests.support.servers.s3_server import BUCKET, environment, exported, moto_server, raw_client
from tests.unit.checkpoint.large import (
    FILES,
    PART,
    SaveLimits,
    holds_step,
    keys_of,
    make_manifest,
    save_step,
    write_step,
)

SMALL_FILES = SaveLimits(file_bytes=4 << 20)
EVER = 10**6

stages = pytest.mark.parametrize("stage", STAGES)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.replace(" ", "-"))


@pytest.fixture(scope="module")
def endpoint():
    with moto_server() as at, exported(environment(at)):
        yield at


@pytest.fixture
def service(endpoint):
    with faulty_service(endpoint) as faulty:
        yield faulty


@pytest.fixture
def prefix():
    return f"p-{uuid4().hex}"


@pytest.fixture
def store(service, prefix, monkeypatch, request):
    """Its client is impatient only where something stalls, and takes no time between its tries."""
    if request.node.callspec.params["kind"] == "stall":
        monkeypatch.setattr(s3, "READ_TIMEOUT_S", 1.0)
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _seconds: None))
    with exported({"AWS_ENDPOINT_URL_S3": service.endpoint}):
        yield S3Store(BUCKET, prefix, part_bytes=PART)


@pytest.fixture
def patient(service, prefix):
    """The same store to somebody who waits longer, for what meets no fault."""
    with exported({"AWS_ENDPOINT_URL_S3": service.endpoint}):
        store = S3Store(BUCKET, prefix, part_bytes=PART)
        assert list(store.list("")) == []  # it connects with what is set now
        yield store


def _limits(stage):
    """Files of one request, or of several parts."""
    return SMALL_FILES if stage == "file" else FILES


def _open_uploads(endpoint, prefix):
    answer = raw_client(endpoint).list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    return answer.get("Uploads", [])


def _collect(store, endpoint, prefix):
    """What `raymega checkpoint prune` does; the service says that every upload is years old."""
    store.abort_stale_uploads(timedelta(days=1), now=datetime.now(UTC))
    assert _open_uploads(endpoint, prefix) == []


@pytest.mark.sample(1)
@kinds
@stages
def test_save_is_committed_through_a_fault_that_passes(
    store, service, endpoint, prefix, stage, kind
):
    save_step(store, 100, limits=_limits(stage))
    service.fail(stage, kind, times=1)
    manifest = save_step(store, 200, limits=_limits(stage))
    assert service.num_left == 0, "the fault was met"
    assert find_restore(store).manifest == manifest and holds_step(store, manifest)
    _collect(store, endpoint, prefix)
    Pruner(store, RetentionPolicy(last=1)).prune()
    assert set(store.list("")) == keys_of(manifest)
    assert holds_step(store, manifest)


@pytest.mark.sample(1)
@kinds
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "manifest"])
def test_save_fails_and_the_one_before_stays_when_the_fault_lasts(
    patient, store, service, endpoint, prefix, monkeypatch, stage, kind
):
    monkeypatch.setattr(s3, "MAX_RETRIES", 0)
    old = save_step(patient, 100, limits=_limits(stage))
    service.fail(stage, kind, times=EVER)
    shard = write_step(store, 200, limits=_limits(stage))
    assert "StorageError" in shard.error and shard.boxes == ()
    service.fail(stage, kind, times=0)
    assert find_restore(patient).manifest == old and holds_step(patient, old)
    new = save_step(patient, 300, limits=_limits(stage))
    _collect(patient, endpoint, prefix)
    Pruner(patient, RetentionPolicy(last=1)).prune()
    assert set(patient.list("")) == keys_of(new) and holds_step(patient, new)


@pytest.mark.sample(1)
@kinds
def test_commit_that_never_gets_an_answer_can_be_made_again(
    patient, store, service, monkeypatch, kind
):
    monkeypatch.setattr(s3, "MAX_RETRIES", 0)
    old, shard = save_step(patient, 100), write_step(patient, 200)
    service.fail("manifest", kind, times=EVER)
    with pytest.raises(StorageError):
        commit(store, make_manifest(shard))
    service.fail("manifest", kind, times=0)
    found = find_restore(patient)
    assert found.broken == () and holds_step(patient, found.manifest)
    assert found.manifest.step == (200 if kind == "lost answer" else old.step)
    commit(patient, make_manifest(shard))
    assert find_restore(patient).manifest.step == 200
