"""Objects in an S3 bucket below a prefix: Amazon's and whatever speaks its protocol.

It owns requests, their patience and ranged reads; parts are storage.s3_multipart's. Credentials,
region and endpoint are found by the client in the usual AWS ways and never kept or shown here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timedelta
from itertools import chain, islice
from threading import Lock
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import boto3.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session

from raymega.errors import Fault, RaymegaError, StorageError
from raymega.storage.keys import check_key, is_key
from raymega.storage.s3_errors import (
    ABSENT_CODES,
    TAKEN_CODES,
    S3Location,
    code_of,
    failures,
    fault_of,
)
from raymega.storage.s3_multipart import (
    PART_BYTES,
    PARTS_IN_FLIGHT,
    Client,
    OpenUpload,
    UploadTarget,
    abort_stale_uploads,
    cut_parts,
    upload_parts,
)
from raymega.storage.s3_ranges import RANGES_IN_FLIGHT, read_range

PROBE_PREFIX = ".raymega-probe-"  # no legal key, so that no reader takes it for an object
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
CONNECT_TIMEOUT_S, READ_TIMEOUT_S, MAX_RETRIES = 5.0, 60.0, 8
PROBE_CONNECT_TIMEOUT_S, PROBE_READ_TIMEOUT_S, PROBE_MAX_RETRIES = 2.0, 4.0, 1
KIND_VARIABLE, KEY_VARIABLE = "RAYMEGA_S3_ENCRYPTION", "RAYMEGA_S3_KMS_KEY_ID"
KINDS = ("AES256", "aws:kms", "aws:kms:dsse")
SETTINGS = {name.lower(): (name.lower(), name, "", None) for name in (KIND_VARIABLE, KEY_VARIABLE)}
"""For the client's own search: name in a profile, name in the environment, default, conversion."""
WRITES = ("PutObject", "CreateMultipartUpload")


def open_s3(uri: str) -> S3Store:
    """The store below ``s3://bucket/prefix``, which must have no :func:`uri_faults`."""
    bucket, prefix = _split(uri)
    return S3Store(bucket, prefix)


def uri_faults(uri: str, *, field: str) -> list[Fault]:
    """What is wrong with the URI itself; asks no service. What precedes an '@' is not shown."""
    bucket, prefix = _split(uri)
    if _BUCKET.fullmatch(bucket) and (not prefix or is_key(prefix)):
        return []
    return [
        Fault(
            fact=f"{field}='s3://{uri.rpartition('@')[2].removeprefix('s3://')}'",
            rule="it must be s3://BUCKET or s3://BUCKET/PREFIX: a bucket of 3 to 63 lower-case "
            "letters, digits, '-' and '.', a prefix of names joined by '/', none of which begins "
            "with '.' or '-'",
            remedy="write s3://my-bucket/runs; the endpoint goes to AWS_ENDPOINT_URL_S3",
        )
    ]


def access_faults(uri: str, *, field: str, is_for_writing: bool) -> list[Fault]:
    """What keeps ``uri`` from being used, known in seconds: lists it, and for writing puts a probe.

    Args:
        uri: Of a store.
        field: What the user calls it, for the message.
        is_for_writing: Also write, read and delete a probe.
    """
    bucket, prefix = _split(uri)
    names = {"Bucket": bucket, "Key": f"{prefix}/{PROBE_PREFIX}{uuid4().hex}".lstrip("/")}
    try:
        client = _connect(bucket, _impatient())
        with failures("use", prefix, _place(client, bucket)):
            client.list_objects_v2(Bucket=bucket, Prefix=names["Key"])
            if is_for_writing:
                client.put_object(**names, Body=b"probe")
                client.get_object(**names)["Body"].read()
                client.delete_object(**names)
    except RaymegaError as error:
        faults = [fault for fault in error.faults if isinstance(fault, Fault)]
        return [
            Fault(fact=f"{field}={uri!r}: {at.fact}", rule=at.rule, remedy=at.remedy)
            for at in faults
        ]
    return []


def drop_unfinished(
    uri: str, *, older_than: timedelta, now: datetime, is_dry: bool = False
) -> list[str]:
    """Abort the uploads below ``uri`` that were begun longer ago than ``older_than``; their keys."""
    stale = open_s3(uri).abort_stale_uploads(older_than, now=now, is_dry=is_dry)
    return [upload.key for upload in stale]


class S3Store:
    """The Store protocol over one bucket; one client serves all threads.

    A put without ``overwrite`` is decided by the service when the object is at most one part long,
    which manifests are. A longer one is only looked for before it is sent: its key must be one
    that no other writer uses, which the names of data files see to. A put that was done but whose
    answer was lost may raise FileExistsError, as the second try meets the first.
    """

    def __init__(self, bucket: str, prefix: str = "", *, part_bytes: int = PART_BYTES) -> None:
        """Touch nothing yet; ``prefix`` has no slash at its ends."""
        self._bucket, self._root = bucket, f"{prefix}/" if prefix else ""
        self._part_bytes = part_bytes
        self._connected: Client = None
        self._lock = Lock()

    @property
    def uri(self) -> str:
        """``s3://bucket/prefix``."""
        return f"s3://{self._bucket}/{self._root}".rstrip("/")

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object; with ``overwrite`` false an existing key raises FileExistsError."""
        target = self._target(key)
        parts = cut_parts(chunks, self._part_bytes)
        head = list(islice(parts, 2))
        if len(head) < 2:
            return self._put_small(target, b"".join(head), overwrite=overwrite)
        if not overwrite and self._size(target) is not None:
            raise FileExistsError(target.key)
        with self._failures("write", target.key):
            return upload_parts(self._client, target, chain(_taken(head), parts))

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Read bytes [start, start + num_bytes), fewer at the end; -1 is to the end."""
        target = self._target(key)
        if num_bytes == 0:
            self.size(key)
            return b""
        with self._failures("read", target.key), _absence(key):
            return read_range(self._client, target, start, num_bytes)

    def size(self, key: str) -> int:
        """Length of an object in bytes."""
        num_bytes = self._size(self._target(key))
        if num_bytes is None:
            raise KeyError(key)
        return num_bytes

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with ``prefix``, in order."""
        with self._failures("list", self._root + prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._root + prefix
            )
            names = [each["Key"] for page in pages for each in page.get("Contents", ())]
        yield from sorted(filter(is_key, (name[len(self._root) :] for name in names)))

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is no error."""
        target = self._target(key)
        with self._failures("delete", target.key), suppress(KeyError), _absence(key):
            self._client.delete_object(**target.names)

    def abort_stale_uploads(
        self, older_than: timedelta, *, now: datetime, is_dry: bool = False
    ) -> tuple[OpenUpload, ...]:
        """Abort what killed writers left below the root; not part of the Store protocol.

        Args:
            older_than: Longer than any upload that is still alive can take, such as a day.
            now: The time, with its zone.
            is_dry: Only say which.
        """
        with self._failures("abort uploads of", self._root):
            uploads = abort_stale_uploads(
                self._client, bucket=self._bucket, prefix=self._root, older_than=older_than, now=now,
                is_dry=is_dry,
            )  # fmt: skip
        return tuple(uploads)

    def _put_small(self, target: UploadTarget, data: bytes, *, overwrite: bool) -> None:
        """One request, which the service itself refuses when the key is taken and may not be."""
        condition = {} if overwrite else {"IfNoneMatch": "*"}
        with self._failures("write", target.key):
            try:
                self._client.put_object(**target.names, Body=data, **condition)
            except ClientError as error:
                if code_of(error) in TAKEN_CODES:
                    raise FileExistsError(target.key) from None
                raise

    def _size(self, target: UploadTarget) -> int | None:
        with self._failures("look at", target.key):
            try:
                return int(self._client.head_object(**target.names)["ContentLength"])
            except ClientError as error:
                if code_of(error) in ABSENT_CODES:
                    return None
                raise

    @property
    def _client(self) -> Client:
        with self._lock:
            if self._connected is None:
                self._connected = _connect(self._bucket, _patient())
            return self._connected

    def _target(self, key: str) -> UploadTarget:
        return UploadTarget(bucket=self._bucket, key=self._root + check_key(key))

    def _failures(self, verb: str, name: str) -> AbstractContextManager[None]:
        return failures(verb, name, _place(self._client, self._bucket))


def _split(uri: str) -> tuple[str, str]:
    bucket, _, prefix = uri.partition("://")[2].partition("/")
    return bucket, prefix.rstrip("/")


def _patient() -> Config:
    return Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "max_attempts": MAX_RETRIES},
        max_pool_connections=2 * max(PARTS_IN_FLIGHT, RANGES_IN_FLIGHT),
        # Manifests and datasets carry checksums of their own, and older services refuse these.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )


def _impatient() -> Config:
    return _patient().merge(
        Config(
            connect_timeout=PROBE_CONNECT_TIMEOUT_S,
            read_timeout=PROBE_READ_TIMEOUT_S,
            retries={"mode": "standard", "max_attempts": PROBE_MAX_RETRIES},
        )
    )


def _connect(bucket: str, config: Config) -> Client:
    """A client of its own session, as sessions are not for several threads.

    Raises:
        StorageError: The settings of the environment make no client.
    """
    nowhere = S3Location(bucket=bucket, endpoint="the configured endpoint")
    try:
        session = Session(session_vars=SETTINGS)
        client = boto3.session.Session(botocore_session=session).client("s3", config=config)
        _encrypt_writes(client, _encryption_of(session))
    except (BotoCoreError, ValueError) as error:
        raise StorageError(fault_of(error, "open", "", nowhere)) from error
    if urlsplit(client.meta.endpoint_url).username is not None:
        raise StorageError(_named_endpoint(_place(client, bucket)))
    return client


def _encryption_of(session: Session) -> dict[str, str]:
    """Request arguments of every write, by environment or profile; none when nothing is set.

    Raises:
        StorageError: The settings do not fit together.
    """
    kind, key = (session.get_config_variable(name) for name in SETTINGS)
    if not kind and not key:
        return {}
    if kind not in KINDS or (key and kind == "AES256"):
        raise StorageError(_odd(kind, has_key=bool(key)))
    return {"ServerSideEncryption": kind} | ({"SSEKMSKeyId": key} if key else {})


def _encrypt_writes(client: Client, arguments: dict[str, str]) -> None:
    """From now on every write of ``client`` carries ``arguments``."""

    def add(params: dict[str, Any], **_: object) -> dict[str, Any]:
        return params | arguments

    for operation in WRITES if arguments else ():
        client.meta.events.register(f"provide-client-params.s3.{operation}", add)


def _odd(kind: str, *, has_key: bool) -> Fault:
    key = f" with {KEY_VARIABLE}" if has_key else ""
    return Fault(
        fact=f"{KIND_VARIABLE}={kind!r}{key}",
        rule=f"it is one of {', '.join(KINDS)}, and only the kms ones take a key",
        remedy=f"set {KIND_VARIABLE}=aws:kms for a key of your own, AES256 for the service's",
    )


def _place(client: Client, bucket: str) -> S3Location:
    url = urlsplit(client.meta.endpoint_url)
    host = url.netloc.rpartition("@")[2]
    return S3Location(bucket=bucket, endpoint=f"{url.scheme}://{host}")


def _named_endpoint(place: S3Location) -> Fault:
    return Fault(
        fact=f"AWS_ENDPOINT_URL_S3 puts a user name before {place.endpoint}",
        rule="credentials do not belong into an endpoint, which is shown in messages",
        remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
    )


def _taken(parts: list[bytes]) -> Iterator[bytes]:
    """The parts one by one, so that none outlives its upload."""
    while parts:
        yield parts.pop(0)


@contextmanager
def _absence(key: str) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        if code_of(error) in ABSENT_CODES:
            raise KeyError(key) from None
        raise
