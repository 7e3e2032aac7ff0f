"""Stores objects in an S3 bucket below a prefix, at Amazon or any service that speaks its protocol.

It owns the client, its timeouts and single requests; uploads in parts are in ``storage/s3_multipart.py``.
boto3 finds credentials, region and endpoint in the usual AWS ways; they are never stored or shown here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from itertools import chain, islice
from threading import Lock
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import boto3.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader, create_loader
from botocore.session import Session

from raymega.errors import Fault, RaymegaError, StorageError
from raymega.storage.keys import check_key, is_key
from raymega.storage.s3_errors import (
    ABSENT_CODES,
    TAKEN_CODES,
    UNKNOWN_STATUSES,
    S3Location,
    code_of,
    failures,
    fault_of,
    status_of,
)
from raymega.storage.s3_multipart import (
    PART_BYTES,
    PARTS_IN_FLIGHT,
    Client,
    OpenUpload,
    UploadTarget,
    cut_parts,
    open_uploads,
    upload_parts,
)
from raymega.storage.s3_ranges import RANGES_IN_FLIGHT, read_range

PROBE_PREFIX = ".raymega-probe-"  # no legal key, so that no reader takes it for an object
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
CONNECT_TIMEOUT_S, READ_TIMEOUT_S, MAX_RETRIES = 5.0, 60.0, 8
DELETED_AT_ONCE = 1000  # the protocol's limit
PROBE_CONNECT_TIMEOUT_S, PROBE_READ_TIMEOUT_S, PROBE_MAX_RETRIES = 2.0, 4.0, 1
KIND_VARIABLE, KEY_VARIABLE = "RAYMEGA_S3_ENCRYPTION", "RAYMEGA_S3_KMS_KEY_ID"
KINDS = ("AES256", "aws:kms", "aws:kms:dsse")
SETTINGS = {name.lower(): (name.lower(), name, "", None) for name in (KIND_VARIABLE, KEY_VARIABLE)}
"""Session variables in botocore's form: name in a profile, name in the environment, default, conversion."""
WRITES = ("PutObject", "CreateMultipartUpload")


def open_store(uri: str) -> S3Store:
    """Return the store below ``s3://bucket/prefix``, which must have no :func:`uri_faults`."""
    bucket, prefix = _split(uri)
    return S3Store(bucket, prefix)


def uri_faults(uri: str, *, field: str) -> list[Fault]:
    """Return the faults of the URI's text, without any request. Text before an '@' is not shown."""
    bucket, prefix = _split(uri)
    if _BUCKET.fullmatch(bucket) and (not prefix or is_key(prefix)):
        return []
    # before an '@' there may be credentials
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
    """Return within seconds why ``uri`` cannot be used; lists it, and for writing puts a probe object.

    Args:
        uri: URI of a store.
        field: Name of the job file's field, for the message.
        is_for_writing: Whether to write, read and delete a probe too.
    """
    bucket, prefix = _split(uri)
    # a key of its own for each probe: several drivers and nodes may probe at once
    names = {"Bucket": bucket, "Key": f"{prefix}/{PROBE_PREFIX}{uuid4().hex}".lstrip("/")}
    try:
        client = _connect(
            bucket, _config(PROBE_CONNECT_TIMEOUT_S, PROBE_READ_TIMEOUT_S, PROBE_MAX_RETRIES)
        )
        with failures("use", prefix, _place(client, bucket)):
            client.list_objects_v2(Bucket=bucket, Prefix=names["Key"])
            if is_for_writing:
                client.put_object(**names, Body=b"probe")
                client.get_object(**names)["Body"].read()
                client.delete_object(**names)
    # the same faults, with the field's name in front
    except RaymegaError as error:
        return [replace(fault, fact=f"{field}={uri!r}: {fault.fact}") for fault in error.faults]
    return []


def drop_unfinished(
    uri: str, *, older_than: timedelta, now: datetime, is_dry: bool = False
) -> list[str]:
    """Abort the uploads below ``uri`` that were begun longer ago than ``older_than``; return their keys."""
    stale = open_store(uri).abort_stale_uploads(older_than, now=now, is_dry=is_dry)
    return [upload.key for upload in stale]


class S3Store:
    """The Store protocol over one bucket; one client serves all threads.

    Without ``overwrite``, the service itself refuses a taken key (If-None-Match) for objects of at most one
    part, as manifests are. For a longer object the key is only looked up before the upload, so no other
    writer may use that key; the names of data files ensure it. A put whose answer was lost may raise
    FileExistsError, because the client's retry finds the object of the first try.
    """

    def __init__(self, bucket: str, prefix: str = "", *, part_bytes: int = PART_BYTES) -> None:
        """Prepare a store without connecting; ``prefix`` has no slash at its ends."""
        self._bucket, self._root = bucket, f"{prefix}/" if prefix else ""
        self._part_bytes = part_bytes
        self._connected: Client = None
        self._lock = Lock()

    @property
    def uri(self) -> str:
        """Root of the store as ``s3://bucket/prefix``."""
        return f"s3://{self._bucket}/{self._root}".rstrip("/")

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object; with ``overwrite`` false an existing key raises FileExistsError."""
        target = self._target(key)
        parts = cut_parts(chunks, self._part_bytes)
        # at most one part: a single request
        head = list(islice(parts, 2))
        if len(head) < 2:
            return self._put_small(target, b"".join(head), overwrite=overwrite)
        # several parts: the key is only looked up before the upload, see the class
        if not overwrite and self._size(target) is not None:
            raise FileExistsError(target.key)
        with self._failures("write", target.key):
            return upload_parts(self._client, target, chain(_taken(head), parts))

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Return bytes [start, start + num_bytes), fewer at the object's end; -1 reads to the end."""
        target = self._target(key)
        # an HTTP range cannot be empty; a missing key must raise all the same
        if num_bytes == 0:
            self.size(key)
            return b""
        with self._failures("read", target.key), _absence(key):
            return read_range(self._client, target, start, num_bytes)

    def size(self, key: str) -> int:
        """Return the length of an object in bytes."""
        num_bytes = self._size(self._target(key))
        if num_bytes is None:
            raise KeyError(key)
        return num_bytes

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys that begin with ``prefix``, in sorted order."""
        return (key for key, _ in self.sizes(prefix))

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the keys that begin with ``prefix``, each with its length in bytes; 1,000 a request."""
        with self._failures("list", self._root + prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._root + prefix
            )
            found = [
                (each["Key"][len(self._root) :], int(each["Size"]))
                for page in pages
                for each in page.get("Contents", ())
            ]
        # probes and foreign objects may lie below the root; they have no legal key
        yield from sorted(each for each in found if is_key(each[0]))

    def folders(self, prefix: str) -> Iterator[str]:
        """See ListsFolders; 1,000 names a request, however many objects lie below them."""
        above = self._root + prefix
        with self._failures("list", above):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=above, Delimiter="/"
            )
            found = [
                each["Prefix"][len(above) : -1]
                for page in pages
                for each in page.get("CommonPrefixes", ())
            ]
        yield from sorted(name for name in found if is_key(prefix + name))

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is no error."""
        target = self._target(key)
        with self._failures("delete", target.key), suppress(KeyError), _absence(key):
            self._client.delete_object(**target.names)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, DELETED_AT_ONCE a request; missing keys are no error.

        A service that lacks such requests, or refuses their checksums, removes them one by one.
        """
        for at in range(0, len(keys), DELETED_AT_ONCE):
            some = keys[at : at + DELETED_AT_ONCE]
            with self._failures("delete", self._target(some[0]).key):
                errors = self._delete_at_once(some)
            if errors is None:
                for key in some:
                    self.delete(key)
            for each in errors or ():
                refused = {"Error": {"Code": each["Code"], "Message": each.get("Message", "")}}
                with self._failures("delete", each["Key"]):
                    raise ClientError(refused, "DeleteObjects")

    def _delete_at_once(self, keys: Sequence[str]) -> Sequence[dict[str, str]] | None:
        """Return the service's refusals of single keys; None where it does not take the whole request."""
        names = [{"Key": self._target(key).key} for key in keys]
        try:
            answer = self._client.delete_objects(
                Bucket=self._bucket, Delete={"Objects": names, "Quiet": True}
            )
        except ClientError as error:
            if status_of(error) in UNKNOWN_STATUSES:
                return None
            raise
        return [each for each in answer.get("Errors", ()) if each["Code"] not in ABSENT_CODES]

    def abort_stale_uploads(
        self, older_than: timedelta, *, now: datetime, is_dry: bool = False
    ) -> tuple[OpenUpload, ...]:
        """Abort the unfinished uploads of killed writers below the root and return them.

        Args:
            older_than: Age from which an upload counts as abandoned, such as a day.
            now: Current time, with its time zone.
            is_dry: Whether to list the uploads without aborting them.
        """
        with self._failures("abort uploads of", self._root):
            uploads = open_uploads(self._client, bucket=self._bucket, prefix=self._root)
            stale = tuple(upload for upload in uploads if now - upload.begun > older_than)
            for upload in () if is_dry else stale:
                self._client.abort_multipart_upload(
                    Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id
                )
        return stale

    def _put_small(self, target: UploadTarget, data: bytes, *, overwrite: bool) -> None:
        """Write an object in one request, which without ``overwrite`` the service refuses if the key exists."""
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
                self._connected = _connect(
                    self._bucket, _config(CONNECT_TIMEOUT_S, READ_TIMEOUT_S, MAX_RETRIES)
                )
            return self._connected

    def _target(self, key: str) -> UploadTarget:
        return UploadTarget(bucket=self._bucket, key=self._root + check_key(key))

    def _failures(self, verb: str, name: str) -> AbstractContextManager[None]:
        return failures(verb, name, _place(self._client, self._bucket))


def _split(uri: str) -> tuple[str, str]:
    bucket, _, prefix = uri.partition("://")[2].partition("/")
    return bucket, prefix.rstrip("/")


def _config(connect_s: float, read_s: float, num_retries: int) -> Config:
    return Config(
        connect_timeout=connect_s,
        read_timeout=read_s,
        retries={"mode": "standard", "max_attempts": num_retries},
        max_pool_connections=2 * max(PARTS_IN_FLIGHT, RANGES_IN_FLIGHT),
        # Manifests and datasets carry checksums of their own, and older services refuse these.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )


def _connect(bucket: str, config: Config) -> Client:
    """Return a new client with a session of its own, because boto3's sessions are not thread-safe.

    Raises:
        StorageError: The settings of the environment are not valid for a client.
    """
    # the endpoint is known only once there is a client
    nowhere = S3Location(bucket=bucket, endpoint="the configured endpoint")
    try:
        session = Session(session_vars=SETTINGS)
        session.register_component("data_loader", _descriptions())
        client = boto3.session.Session(botocore_session=session).client("s3", config=config)
        _encrypt_writes(client, _encryption_of(session))
    except (BotoCoreError, ValueError) as error:
        raise StorageError(fault_of(error, "open", "", nowhere)) from error
    # messages show the endpoint, which must hold no credentials
    if urlsplit(client.meta.endpoint_url).username is not None:
        raise StorageError(
            fact=f"AWS_ENDPOINT_URL_S3 puts a user name before {_place(client, bucket).endpoint}",
            rule="credentials do not belong into an endpoint, which is shown in messages",
            remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
        )
    return client


def load_client() -> None:
    """Make a client, so that this process makes later ones in a fifth of the time."""
    with suppress(StorageError):  # told when a store is used
        _connect("none", _config(CONNECT_TIMEOUT_S, READ_TIMEOUT_S, MAX_RETRIES))


@cache
def _descriptions() -> Loader:
    """Return botocore's descriptions of services, read once a process: four fifths of the time of a client."""
    return create_loader()


def _encryption_of(session: Session) -> dict[str, str]:
    """Return the encryption arguments for every write, from environment or profile; empty if none is set.

    Raises:
        StorageError: The settings contradict each other.
    """
    kind, key = (session.get_config_variable(name) for name in SETTINGS)
    if not kind and not key:
        return {}
    if kind not in KINDS or (key and kind == "AES256"):
        raise StorageError(
            fact=f"{KIND_VARIABLE}={kind!r}{f' with {KEY_VARIABLE}' if key else ''}",
            rule=f"it is one of {', '.join(KINDS)}, and only the kms ones take a key",
            remedy=f"set {KIND_VARIABLE}=aws:kms for a key of your own, AES256 for the service's",
        )
    return {"ServerSideEncryption": kind} | ({"SSEKMSKeyId": key} if key else {})


def _encrypt_writes(client: Client, arguments: dict[str, str]) -> None:
    """Add ``arguments`` to every later write of ``client``."""

    def add(params: dict[str, Any], **_: object) -> dict[str, Any]:
        return params | arguments

    for operation in WRITES if arguments else ():
        client.meta.events.register(f"provide-client-params.s3.{operation}", add)


def _place(client: Client, bucket: str) -> S3Location:
    url = urlsplit(client.meta.endpoint_url)
    host = url.netloc.rpartition("@")[2]
    return S3Location(bucket=bucket, endpoint=f"{url.scheme}://{host}")


def _taken(parts: list[bytes]) -> Iterator[bytes]:
    """Yield the parts and empty the list, so that each is freed after its upload."""
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
