"""Reads an object, or a range of it, in pieces that are fetched concurrently.

It owns the pieces and the retry of a response body that broke off; boto3 retries requests that got no
answer. A read takes twice the range in memory.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from botocore import exceptions as boto
from botocore.exceptions import ClientError

from raymega.errors import StorageError
from raymega.storage.s3_errors import code_of
from raymega.storage.s3_multipart import Client, UploadTarget

log = logging.getLogger(__name__)

RANGE_BYTES = 16 << 20
RANGES_IN_FLIGHT = 4
MAX_TRIES = 6
_TORN = (boto.ReadTimeoutError, boto.ResponseStreamingError, boto.IncompleteReadError)

Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Bytes of one range, with the length (``total``) and entity tag of the whole object."""

    data: bytes
    total: int
    tag: str


def read_range(client: Client, target: UploadTarget, start: int, num_bytes: int) -> bytes:
    """Return bytes [start, start + num_bytes) of an object, fewer at its end; -1 reads to the end.

    Raises:
        ClientError: The service refused the request, for example because the object is missing.
        StorageError: The object was replaced while it was read.
    """
    # first piece: its answer tells the object's length
    wanted = RANGE_BYTES if num_bytes < 0 else min(num_bytes, RANGE_BYTES)
    first = _fetch(client, target, start, start + wanted)
    end = first.total if num_bytes < 0 else min(first.total, start + num_bytes)
    starts = range(start + len(first.data), end, RANGE_BYTES)
    if not starts:
        return first.data
    # all other pieces, concurrently
    with ThreadPoolExecutor(RANGES_IN_FLIGHT, thread_name_prefix="s3-range") as pool:
        rest = list(
            pool.map(lambda at: _fetch(client, target, at, min(at + RANGE_BYTES, end)), starts)
        )
    # pieces of two versions of the object must not be mixed
    if any(piece.tag != first.tag for piece in rest):
        raise StorageError(
            fact=f"s3://{target.bucket}/{target.key} was replaced while it was read",
            rule="what is read must be one object",
            remedy="read again, and see that only one run writes there",
        )
    return b"".join([first.data, *(piece.data for piece in rest)])


def _fetch(client: Client, target: UploadTarget, start: int, end: int) -> _Piece:
    """Return bytes [start, end); a body that breaks off is requested again after growing pauses."""
    for tries in range(1, MAX_TRIES):
        answer = _ask(client, target, start, end)
        try:
            return _piece_of(answer, start, end)
        except _TORN as error:
            log.info("reading %s again after %s", target.key, type(error).__name__)
            time.sleep(0.1 * 2**tries)
    return _piece_of(_ask(client, target, start, end), start, end)


def _ask(client: Client, target: UploadTarget, start: int, end: int) -> Answer | None:
    """Return the answer with its body unread, or None if ``start`` is at or after the object's end."""
    try:
        answer: Answer = client.get_object(**target.names, Range=f"bytes={start}-{end - 1}")
    except ClientError as error:
        if code_of(error) in ("InvalidRange", "416"):
            return None
        raise
    return answer


def _piece_of(answer: Answer | None, start: int, end: int) -> _Piece:
    if answer is None:
        return _Piece(data=b"", total=0, tag="")
    data, tag = answer["Body"].read(), str(answer["ETag"])
    if "ContentRange" not in answer:  # a service may ignore the range and send the whole object
        return _Piece(data=data[start:end], total=len(data), tag=tag)
    return _Piece(data=data, total=int(answer["ContentRange"].rpartition("/")[2]), tag=tag)
