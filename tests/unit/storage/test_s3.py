"""The S3 store against a service in memory: the contract, parts, tears, refusals and secrets."""

import json
import logging
import os
import socket
import tracemalloc
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from typer.testing import CliRunner

from raymega.cli.main import app
from raymega.errors import ConfigError, StorageError
from raymega.storage import s3, s3_multipart
from raymega.storage.registry import open_store, store_faults
from raymega.storage.s3 import S3Store
from raymega.storage.s3_multipart import PARTS_IN_FLIGHT, cut_parts
from tests.support.servers.ports import CLOSED_PORT
from tests.support.servers.s3_server import (
    ACCESS_KEY,
    BUCKET,
    SECRET_KEY,
    TearingProxy,
    environment,
    exported,
    moto_server,
    raw_client,
)
from tests.support.store_contract import *  # noqa: F403  # the tests, against the fixture below

PROBE_S = (1 + s3.PROBE_MAX_RETRIES) * (s3.PROBE_CONNECT_TIMEOUT_S + s3.PROBE_READ_TIMEOUT_S)
"""The longest that a probe may take."""
PART = 5 << 20  # the least that services take
SEVERAL_PARTS = 2 * PART + 12345


@pytest.fixture(scope="module")
def endpoint():
    with moto_server() as at, exported(environment(at)):
        yield at


@pytest.fixture(autouse=True)
def _patient_probe(monkeypatch):
    """A service that is well may be slow on a busy machine."""
    monkeypatch.setattr(s3, "PROBE_CONNECT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(s3, "PROBE_READ_TIMEOUT_S", 60.0)


@pytest.fixture
def prefix():
    return f"p-{uuid4().hex}"


@pytest.fixture
def store(endpoint, prefix):
    return S3Store(BUCKET, prefix, part_bytes=PART)


@pytest.fixture
def raw(endpoint):
    return raw_client(endpoint)


def _open_uploads(raw):
    return raw.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])


def _random(num_bytes):
    return os.urandom(num_bytes)


def test_chunks_become_parts_of_one_size():
    chunks = [b"a" * 3, b"", memoryview(b"b" * 9), b"c" * 2]
    parts = list(cut_parts(chunks, 4))
    assert [len(part) for part in parts] == [4, 4, 4, 2]
    assert b"".join(parts) == b"aaabbbbbbbbbcc"
    assert list(cut_parts([], 4)) == list(cut_parts([b""], 4)) == []
    assert [len(part) for part in cut_parts([b"x" * 8], 4)] == [4, 4]


def test_uri_names_bucket_and_prefix(endpoint, prefix):
    store = open_store(f"s3://{BUCKET}/{prefix}/deep/")
    assert store.uri == f"s3://{BUCKET}/{prefix}/deep"
    store.put("k", [b"x"], overwrite=False)
    assert open_store(store.uri).get("k") == b"x"
    assert list(open_store(f"s3://{BUCKET}").list(prefix)) == [f"{prefix}/deep/k"]


def test_object_of_several_parts_reads_back(store, raw, monkeypatch):
    monkeypatch.setattr("raymega.storage.s3_ranges.RANGE_BYTES", 1 << 20)
    data = _random(SEVERAL_PARTS)
    chunks = [data[:7], memoryview(data)[7 : PART + 1], data[PART + 1 :]]
    store.put("big", chunks, overwrite=False)
    assert store.size("big") == len(data) and store.get("big") == data
    assert store.get("big", start=PART - 1, num_bytes=PART) == data[PART - 1 : 2 * PART - 1]
    assert store.get("big", start=3) == data[3:]
    tag = raw.head_object(Bucket=BUCKET, Key=store.uri.partition(f"{BUCKET}/")[2] + "/big")["ETag"]
    assert tag.strip('"').endswith("-3"), "it was sent in three parts"
    with pytest.raises(FileExistsError):
        store.put("big", [data], overwrite=False)
    store.put("big", [data[::-1]], overwrite=True)
    assert store.get("big") == data[::-1]


class _StoppedError(Exception):
    """What a trainer may raise while it saves."""


@pytest.mark.parametrize("num_bytes", [100, PART + 1, 3 * PART])
def test_failed_put_leaves_nothing_and_keeps_the_old_object(store, raw, num_bytes):
    store.put("k", [b"old"], overwrite=True)

    def chunks():
        yield b"x" * num_bytes
        raise _StoppedError

    with pytest.raises(_StoppedError):
        store.put("k", chunks(), overwrite=True)
    with pytest.raises(_StoppedError):
        store.put("new", chunks(), overwrite=False)
    assert list(store.list("")) == ["k"] and store.get("k") == b"old"
    assert _open_uploads(raw) == []


def test_part_that_is_refused_aborts_the_upload(store, raw, monkeypatch):
    send, calls = s3_multipart._send, []

    def refuse(client, upload, number, body):
        calls.append(number)
        if number == 2:
            raise _StoppedError
        return send(client, upload, number, body)

    monkeypatch.setattr(s3_multipart, "_send", refuse)
    with pytest.raises(_StoppedError):
        store.put("k", [_random(4 * PART)], overwrite=False)
    assert list(store.list("")) == [] and _open_uploads(raw) == []


@pytest.mark.parametrize(
    ("status", "code"),
    [(501, "NotImplemented"), (400, "InvalidRequest"), (405, "MethodNotAllowed")],
)
def test_service_without_deletion_of_many_objects_deletes_them_one_by_one(
    store, monkeypatch, status, code
):
    def refuse(**_):
        answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise ClientError(answer, "DeleteObjects")

    for key in ("a", "b", "c"):
        store.put(key, [b"x"], overwrite=False)
    monkeypatch.setattr(store._client, "delete_objects", refuse)
    store.delete_many(["a", "absent", "c"])
    assert list(store.list("")) == ["b"]


def test_key_that_is_not_deleted_is_told_and_an_absent_one_is_no_error(store, monkeypatch):
    def answer(*codes):
        found = {"Errors": [{"Key": f"p/{code}", "Code": code} for code in codes]}
        monkeypatch.setattr(store._client, "delete_objects", lambda **_: found)

    answer("NoSuchKey")
    store.delete_many(["a"])
    answer("NoSuchKey", "AccessDenied")
    with pytest.raises(StorageError, match=r"could not delete .*p/AccessDenied.*AccessDenied"):
        store.delete_many(["a", "b"])


def _no_such_upload():
    return ClientError({"Error": {"Code": "NoSuchUpload"}}, "CompleteMultipartUpload")


def test_completion_whose_answer_was_lost_counts(store, monkeypatch):
    client = store._client
    complete = client.complete_multipart_upload

    def complete_silently(**names):
        complete(**names)
        raise _no_such_upload()

    monkeypatch.setattr(client, "complete_multipart_upload", complete_silently)
    data = _random(SEVERAL_PARTS)
    store.put("k", [data], overwrite=False)
    assert store.get("k") == data


@pytest.mark.parametrize("old", [True, False], ids=["old object", "no object"])
def test_upload_that_is_gone_is_not_taken_for_an_older_object(store, monkeypatch, raw, old):
    if old:
        store.put("k", [_random(SEVERAL_PARTS)], overwrite=False)

    def lose(**_names):
        raise _no_such_upload()

    monkeypatch.setattr(store._client, "complete_multipart_upload", lose)
    with pytest.raises(StorageError, match="NoSuchUpload"):
        store.put("k", [_random(SEVERAL_PARTS)], overwrite=True)
    assert _open_uploads(raw) == []


def test_put_takes_a_bounded_number_of_parts_of_memory(store):
    block = _random(PART)
    store.put("warm", [block, block], overwrite=True)
    tracemalloc.start()
    try:
        store.put("k", [block] * 12, overwrite=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 2 * PART < peak < (PARTS_IN_FLIGHT + 2) * PART + (2 << 20)


def test_stale_uploads_of_killed_writers_are_aborted_below_the_root_only(store, raw, prefix):
    names = [f"{prefix}/torn", "elsewhere/torn"]
    uploads = [raw.create_multipart_upload(Bucket=BUCKET, Key=name) for name in names]
    begun = _open_uploads(raw)[0]["Initiated"]
    day = timedelta(hours=24)
    assert store.abort_stale_uploads(day, now=begun + timedelta(hours=23)) == ()
    (gone,) = store.abort_stale_uploads(day, now=begun + timedelta(hours=25))
    assert gone.key == names[0] and gone.begun == begun
    assert [each["Key"] for each in _open_uploads(raw)] == [names[1]]
    raw.abort_multipart_upload(Bucket=BUCKET, Key=names[1], UploadId=uploads[1]["UploadId"])


def test_prune_aborts_uploads_that_are_old_enough(store, raw, prefix):
    raw.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/torn")
    century_h = str(100 * 365 * 24)  # this service says that every upload began in 2010
    young = CliRunner().invoke(app, ["checkpoint", "prune", store.uri, "--older-than", century_h])
    assert (young.exit_code, len(_open_uploads(raw))) == (0, 1), young.output
    words = ["checkpoint", "prune", store.uri, "--older-than", "0", "--json"]
    dry = CliRunner().invoke(app, [*words, "--dry-run"])
    assert json.loads(dry.stdout)["aborted"] == [f"{prefix}/torn"]
    assert len(_open_uploads(raw)) == 1
    old = CliRunner().invoke(app, words)
    assert json.loads(old.stdout)["aborted"] == [f"{prefix}/torn"]
    assert _open_uploads(raw) == []


def test_prune_leaves_a_folder_alone(tmp_path):
    done = CliRunner().invoke(app, ["checkpoint", "prune", str(tmp_path)])
    assert done.exit_code == 0 and done.stdout.startswith("0 unfinished uploads")


def test_answer_that_tears_is_read_again(store, endpoint, prefix, monkeypatch):
    monkeypatch.setattr("raymega.storage.s3_ranges.RANGE_BYTES", 1 << 20)
    pauses = []
    monkeypatch.setattr("raymega.storage.s3_ranges.time", SimpleNamespace(sleep=pauses.append))
    data = _random(4 << 20)
    store.put("k", [data], overwrite=False)
    proxy = TearingProxy(endpoint, limit=300_000, num_tears=4)
    with exported({"AWS_ENDPOINT_URL_S3": proxy.endpoint}):
        assert S3Store(BUCKET, prefix).get("k") == data
    proxy.close()
    assert proxy.num_left < 0, "all four answers were torn, and others passed"
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6]), "those of the first range"


def test_request_without_an_answer_is_left_to_the_client_to_repeat(store, monkeypatch):
    asked = []

    def refuse(**names):
        asked.append(names)
        raise EndpointConnectionError(endpoint_url="http://x")

    monkeypatch.setattr(store._client, "get_object", refuse)
    with pytest.raises(StorageError, match="EndpointConnectionError"):
        store.get("k")
    assert len(asked) == 1


def test_object_that_is_replaced_while_it_is_read_is_refused(store, monkeypatch):
    monkeypatch.setattr("raymega.storage.s3_ranges.RANGE_BYTES", 100)
    store.put("k", [b"a" * 300], overwrite=False)
    client = store._client
    get = client.get_object

    def get_then_replace(**names):
        answer = get(**names)
        store.put("k", [b"b" * 300], overwrite=True)
        return answer

    monkeypatch.setattr(client, "get_object", get_then_replace)
    with pytest.raises(StorageError, match="replaced while it was read"):
        store.get("k")


def test_foreign_objects_are_not_listed(store, raw, prefix):
    for name in ("", ".raymega-probe-1", "a//b", "good"):
        raw.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=b"")
    assert list(store.list("")) == ["good"]


def test_list_goes_on_over_pages(store):
    client = store._client
    paginate = client.get_paginator
    client.get_paginator = lambda name: _Paged(paginate(name))
    keys = [f"k{i}" for i in range(7)]
    for key in keys:
        store.put(key, [b"x"], overwrite=False)
    assert list(store.list("")) == keys


class _Paged:
    def __init__(self, paginator) -> None:
        self._paginator = paginator

    def paginate(self, **names):
        return self._paginator.paginate(**names, PaginationConfig={"PageSize": 3})


def test_client_is_patient_and_leaves_checksums_to_the_manifests(store):
    config = store._client.meta.config
    assert (config.connect_timeout, config.read_timeout) == (5, 60)
    assert config.retries == {"mode": "standard", "total_max_attempts": 9}
    assert config.request_checksum_calculation == "when_required"
    assert config.max_pool_connections >= PARTS_IN_FLIGHT


def test_usable_uri_has_no_fault_and_keeps_no_litter(endpoint, raw, prefix):
    assert store_faults(f"s3://{BUCKET}/{prefix}") == store_faults(f"s3://{BUCKET}") == []
    assert "Contents" not in raw.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    assert "Contents" not in raw.list_objects_v2(Bucket=BUCKET, Prefix=".raymega")


@pytest.mark.parametrize(
    "uri",
    ["s3://", "s3:///runs", "s3://UPPER/runs", "s3://ab", "s3://b-1/../up", "s3://b-1/a//b"],
)
def test_malformed_uri_is_a_fault_without_asking_a_service(uri):
    (fault,) = store_faults(uri)
    assert f"checkpoint.uri='{uri}'" in fault.fact and "s3://BUCKET/PREFIX" in fault.rule
    with pytest.raises(ConfigError):
        open_store(uri)


REFUSALS = {
    "bucket": ({}, "s3://no-such-bucket/runs", "NoSuchBucket", "create it"),
    "credentials": (
        {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
        f"s3://{BUCKET}/runs",
        "NoCredentialsError",
        "AWS_ACCESS_KEY_ID",
    ),
    "half": (
        {"AWS_ACCESS_KEY_ID": ""},
        f"s3://{BUCKET}/runs",
        "NoCredentialsError",
        "AWS_ACCESS_KEY_ID",
    ),
    "profile": (
        {"AWS_PROFILE": "absent"},
        f"s3://{BUCKET}/runs",
        "ProfileNotFound",
        "AWS_PROFILE",
    ),
    "unreachable": (
        {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{CLOSED_PORT}"},
        f"s3://{BUCKET}/runs",
        "EndpointConnectionError",
        "AWS_ENDPOINT_URL_S3",
    ),
    "no scheme": (
        {"AWS_ENDPOINT_URL_S3": "localhost:9000"},
        f"s3://{BUCKET}/runs",
        "ValueError",
        "AWS_ENDPOINT_URL_S3",
    ),
    "user in endpoint": (
        {"AWS_ENDPOINT_URL_S3": f"http://me:{SECRET_KEY}@127.0.0.1:1"},
        f"s3://{BUCKET}/runs",
        "puts a user name before http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID",
    ),
    "user in uri": (
        {},
        f"s3://{ACCESS_KEY}:{SECRET_KEY}@{BUCKET}/runs/",
        "checkpoint.uri='s3://runs/runs/'",
        "AWS_ENDPOINT_URL_S3",
    ),
}


@pytest.fixture
def pauses(monkeypatch):
    """What a client waits between its tries, which takes no time."""
    found = []
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=found.append))
    return found


@pytest.mark.parametrize("name", REFUSALS)
def test_unusable_service_is_one_fault_that_names_the_way_out_and_no_secret(
    endpoint, name, caplog, pauses
):
    settings, uri, fact, remedy = REFUSALS[name]
    with exported(settings), caplog.at_level(logging.INFO):
        (fault,) = store_faults(uri)
    assert len(pauses) == (s3.PROBE_MAX_RETRIES if name == "unreachable" else 0)
    assert "checkpoint.uri=" in fault.fact and BUCKET[:2] in fault.fact
    assert fact in fault.fact and remedy in fault.remedy
    assert SECRET_KEY not in f"{fault}{caplog.text}" and ACCESS_KEY not in f"{fault}{caplog.text}"


def test_silent_endpoint_is_a_fault_in_seconds(monkeypatch, pauses):
    """It is asked twice, and is given so many seconds each time."""
    assert PROBE_S <= 12
    monkeypatch.setattr(s3, "PROBE_READ_TIMEOUT_S", 0.3)
    configs, connect = [], s3._connect
    monkeypatch.setattr(
        s3, "_connect", lambda *words: (configs.append(words[1]), connect(*words))[1]
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with exported(environment(at)):
            (fault,) = store_faults(f"s3://{BUCKET}/runs")
        assert _num_connections(listener) == 1 + s3.PROBE_MAX_RETRIES == 1 + len(pauses)
    (config,) = configs
    assert (config.connect_timeout, config.read_timeout) == (60.0, 0.3)
    assert f"at {at}: ReadTimeoutError" in fault.fact and "AWS_ENDPOINT_URL_S3" in fault.remedy


def _num_connections(listener):
    """How many came that nobody took."""
    listener.setblocking(False)
    number = 0
    with suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            number += 1
    return number


@pytest.mark.parametrize("verb", ["write", "read", "look at", "list", "delete", "abort uploads of"])
def test_every_method_says_bucket_key_endpoint_and_cause_but_no_secret(
    endpoint, verb, caplog, capfd
):
    store = S3Store("no-such-bucket", "runs")
    now = datetime(2030, 1, 1, tzinfo=UTC)
    calls = {
        "write": lambda: store.put("k", [b"x" * SEVERAL_PARTS], overwrite=True),
        "read": lambda: store.get("k"),
        "look at": lambda: store.size("k"),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete("k"),
        "abort uploads of": lambda: store.abort_stale_uploads(timedelta(1), now=now),
    }
    if verb == "look at":  # an answer without a body does not say which of the two is missing
        with pytest.raises(KeyError):
            calls[verb]()
        return
    with caplog.at_level(logging.INFO), pytest.raises(StorageError) as caught:
        calls[verb]()
    text = str(caught.value)
    assert f"could not {verb} s3://no-such-bucket/runs/" in text and f"at {endpoint}" in text
    assert "NoSuchBucket" in text and "create it" in text
    assert SECRET_KEY not in text + caplog.text + "".join(capfd.readouterr())
