"""Reads an object, or a range of it, in pieces that are fetched side by side.

It owns pieces and the second try of a body that tore; a request that got no answer is tried again
by the client. A read takes memory for the range twice.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from botocore import exceptions as boto
from botocore.exceptions import ClientError

from raymega.errors import Fault, StorageError
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
    """Bytes of an object, and what the answer said about the whole: its length and entity tag."""

    data: bytes
    total: int
    tag: str


def read_range(client: Client, target: UploadTarget, start: int, num_bytes: int) -> bytes:
    """Bytes [start, start + num_bytes) of an object, fewer at its end; -1 is to the end.

    Raises:
        ClientError: The service refused; a missing object is one of its codes.
        StorageError: The object was replaced while it was read.
    """
    wanted = RANGE_BYTES if num_bytes < 0 else min(num_bytes, RANGE_BYTES)
    first = _fetch(client, target, start, start + wanted)
    end = first.total if num_bytes < 0 else min(first.total, start + num_bytes)
    starts = range(start + len(first.data), end, RANGE_BYTES)
    if not starts:
        return first.data
    with ThreadPoolExecutor(RANGES_IN_FLIGHT, thread_name_prefix="s3-range") as pool:
        rest = list(
            pool.map(lambda at: _fetch(client, target, at, min(at + RANGE_BYTES, end)), starts)
        )
    if any(piece.tag != first.tag for piece in rest):
        raise StorageError(_replaced(target))
    return b"".join([first.data, *(piece.data for piece in rest)])


def _fetch(client: Client, target: UploadTarget, start: int, end: int) -> _Piece:
    """One piece; a body that tears is asked for again, with growing pauses."""
    for tries in range(1, MAX_TRIES):
        answer = _ask(client, target, start, end)
        try:
            return _piece_of(answer, start, end)
        except _TORN as error:
            log.info("reading %s again after %s", target.key, type(error).__name__)
            time.sleep(0.1 * 2**tries)
    return _piece_of(_ask(client, target, start, end), start, end)


def _ask(client: Client, target: UploadTarget, start: int, end: int) -> Answer | None:
    """The answer up to its body, or None when the range begins at or behind the object's end."""
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
    if "ContentRange" not in answer:  # a service may send all of it
        return _Piece(data=data[start:end], total=len(data), tag=tag)
    return _Piece(data=data, total=int(answer["ContentRange"].rpartition("/")[2]), tag=tag)


def _replaced(target: UploadTarget) -> Fault:
    return Fault(
        fact=f"s3://{target.bucket}/{target.key} was replaced while it was read",
        rule="what is read must be one object",
        remedy="read again, and see that only one run writes there",
    )
