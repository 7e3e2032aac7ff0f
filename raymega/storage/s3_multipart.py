"""Uploads an object in parts: nothing is visible before the last request, and a failure aborts it.

It owns the parts and their memory, and finds what killed writers left; single requests are in ``storage/s3.py``.
An upload takes at most (PARTS_IN_FLIGHT + 2) parts of memory in addition to the caller's: 192 MiB.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
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
    """Bucket and full key of an object, which every request of an upload repeats."""

    bucket: str
    key: str

    @property
    def names(self) -> dict[str, str]:
        """Bucket and key as request arguments of the client."""
        return {"Bucket": self.bucket, "Key": self.key}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenUpload:
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    begun: datetime


def cut_parts(chunks: Iterable[bytes | memoryview], part_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of ``chunks`` in pieces of ``part_bytes``, the last one shorter; none if empty."""
    gathered: list[memoryview] = []
    missing = part_bytes  # of the part being gathered
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
    """Write an object of at least one part; any exception aborts the upload.

    When iterating over ``parts`` raises, the object is not written and an older one of that key stays.
    """
    upload_id = client.create_multipart_upload(**target.names)["UploadId"]
    upload = target.names | {"UploadId": upload_id}
    try:
        done = _send_all(client, upload, parts)
        _complete(client, upload, done)
    # also on KeyboardInterrupt: parts of an open upload take space and are invisible
    except BaseException:
        _abort(client, upload)
        raise


def open_uploads(client: Client, *, bucket: str, prefix: str) -> Iterator[OpenUpload]:
    """Yield the open uploads below ``prefix``: under way, or left by a killed writer."""
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
    for page in pages:
        for each in page.get("Uploads", ()):
            yield OpenUpload(key=each["Key"], upload_id=each["UploadId"], begun=each["Initiated"])


def _send_all(client: Client, upload: dict[str, str], parts: Iterable[bytes]) -> list[Part]:
    """Send the parts, PARTS_IN_FLIGHT at a time; no request is under way when it returns or raises."""
    done: list[Part] = []
    pending: set[Future[Part]] = set()
    with ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="s3-part") as pool:
        try:
            for number, body in enumerate(parts, start=1):
                # the window is full: wait for a part before the next one is read into memory
                if len(pending) == PARTS_IN_FLIGHT:
                    finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                    done += [future.result() for future in finished]
                pending.add(pool.submit(_send, client, upload, number, body))
            done += [future.result() for future in pending]
        # leaving the pool's block waits for requests that are under way
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sorted(done, key=lambda part: int(part["PartNumber"]))


def _send(client: Client, upload: dict[str, str], number: int, body: bytes) -> Part:
    answer = client.upload_part(**upload, PartNumber=number, Body=body)
    return {"PartNumber": number, "ETag": answer["ETag"]}


def _complete(client: Client, upload: dict[str, str], parts: list[Part]) -> None:
    """Complete the upload, which makes the object visible.

    When a server completes the upload but its answer is lost, the client's retry gets NoSuchUpload. Then the
    object counts as written if its entity tag is that of these parts.
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
    """Return the entity tag of a multipart object: the MD5 of its parts' MD5s, and their number."""
    tags = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in parts)
    return f"{hashlib.md5(tags, usedforsecurity=False).hexdigest()}-{len(parts)}"


def _abort(client: Client, upload: dict[str, str]) -> None:
    """Abort the upload to free its parts' space; if that fails, log the upload that remains."""
    try:
        client.abort_multipart_upload(**upload)
    except (ClientError, BotoCoreError) as error:
        if isinstance(error, ClientError) and code_of(error) == "NoSuchUpload":
            return
        log.warning(
            "upload %s of %s is left unfinished (%s)",
            upload["UploadId"], upload["Key"], type(error).__name__,
        )  # fmt: skip
