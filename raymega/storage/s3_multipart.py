"""Uploads an object in parts: nothing is visible before the last step, and a failure aborts.

It owns parts, their memory and what killed writers leave behind; single requests are storage.s3's.
A put takes at most (PARTS_IN_FLIGHT + 2) parts of memory beside what the caller holds: 192 MiB.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from raymega.storage.s3_errors import ABSENT_CODES, code_of

log = logging.getLogger(__name__)

PART_BYTES = 32 << 20
PARTS_IN_FLIGHT = 4

Client = Any  # boto3 makes its classes at run time
Part = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadTarget:
    """Which object: the names that every request of an upload repeats."""

    bucket: str
    key: str

    @property
    def names(self) -> dict[str, str]:
        """As request arguments."""
        return {"Bucket": self.bucket, "Key": self.key}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenUpload:
    """An upload that was begun and neither finished nor aborted."""

    key: str
    upload_id: str
    begun: datetime


def cut_parts(chunks: Iterable[bytes | memoryview], part_bytes: int) -> Iterator[bytes]:
    """The bytes of ``chunks`` in pieces of ``part_bytes``, the last one shorter; none when empty."""
    gathered: list[memoryview] = []
    missing = part_bytes
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:
            gathered.append(rest[:missing])
            rest, missing = rest[missing:], missing - len(gathered[-1])
            if missing == 0:
                yield b"".join(gathered)
                gathered, missing = [], part_bytes
    if gathered:
        yield b"".join(gathered)


def upload_parts(client: Client, target: UploadTarget, parts: Iterable[bytes]) -> None:
    """Write an object of at least one part; whatever is raised on the way, the upload is aborted.

    When ``parts`` raises, the object is not written and an older one of that name stays.
    """
    upload_id = client.create_multipart_upload(**target.names)["UploadId"]
    upload = target.names | {"UploadId": upload_id}
    try:
        done = _send_all(client, upload, parts)
        _complete(client, upload, done)
    except BaseException:
        _abort(client, upload)
        raise


def list_open_uploads(client: Client, *, bucket: str, prefix: str) -> list[OpenUpload]:
    """Uploads below ``prefix`` that are under way or that a killed writer left; they cost space."""
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
    return [
        OpenUpload(key=each["Key"], upload_id=each["UploadId"], begun=each["Initiated"])
        for page in pages
        for each in page.get("Uploads", ())
    ]


def abort_stale_uploads(
    client: Client,
    *,
    bucket: str,
    prefix: str,
    older_than: timedelta,
    now: datetime,
    is_dry: bool = False,
) -> list[OpenUpload]:
    """Abort the uploads below ``prefix`` that were begun longer ago than ``older_than``.

    Args:
        client: S3 client.
        bucket: Bucket.
        prefix: Beginning of the keys; empty is the whole bucket.
        older_than: Longer than any upload that is still alive can take.
        now: The time, with its zone.
        is_dry: Only say which.
    """
    uploads = list_open_uploads(client, bucket=bucket, prefix=prefix)
    stale = [upload for upload in uploads if now - upload.begun > older_than]
    for upload in () if is_dry else stale:
        client.abort_multipart_upload(Bucket=bucket, Key=upload.key, UploadId=upload.upload_id)
    return stale


def _send_all(client: Client, upload: dict[str, str], parts: Iterable[bytes]) -> list[Part]:
    """Send the parts, PARTS_IN_FLIGHT at a time; no part is under way when it returns or raises."""
    done: list[Part] = []
    pending: set[Future[Part]] = set()
    with ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="s3-part") as pool:
        try:
            for number, body in enumerate(parts, start=1):
                if len(pending) == PARTS_IN_FLIGHT:
                    finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                    done += [future.result() for future in finished]
                pending.add(pool.submit(_send, client, upload, number, body))
            done += [future.result() for future in pending]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sorted(done, key=lambda part: int(part["PartNumber"]))


def _send(client: Client, upload: dict[str, str], number: int, body: bytes) -> Part:
    answer = client.upload_part(**upload, PartNumber=number, Body=body)
    return {"PartNumber": number, "ETag": answer["ETag"]}


def _complete(client: Client, upload: dict[str, str], parts: list[Part]) -> None:
    """Make the object visible.

    A server that did so but died before it answered tells the second try that there is no such
    upload; then the object that is there is ours when it has our parts' entity tag.
    """
    try:
        client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    except ClientError as error:
        names = {name: upload[name] for name in ("Bucket", "Key")}
        if code_of(error) != "NoSuchUpload" or _tag_of(client, names) != _tag_of_parts(parts):
            raise


def _tag_of(client: Client, names: dict[str, str]) -> str:
    try:
        return str(client.head_object(**names)["ETag"]).strip('"')
    except ClientError as error:
        if code_of(error) in ABSENT_CODES:
            return ""
        raise


def _tag_of_parts(parts: list[Part]) -> str:
    """The entity tag of a multipart object: MD5 over its parts' MD5s, and their number."""
    tags = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in parts)
    return f"{hashlib.md5(tags, usedforsecurity=False).hexdigest()}-{len(parts)}"


def _abort(client: Client, upload: dict[str, str]) -> None:
    """Give the parts' space back; a store that does not answer keeps them, invisible, till then."""
    try:
        client.abort_multipart_upload(**upload)
    except (ClientError, BotoCoreError) as error:
        if isinstance(error, ClientError) and code_of(error) == "NoSuchUpload":
            return
        log.warning(
            "upload %s of %s is left unfinished (%s)",
            upload["UploadId"], upload["Key"], type(error).__name__,
        )  # fmt: skip
