"""A keeper: objects in the memory of a process that other processes reach over the network.

It serves what RemoteMemoryStore asks for, to whoever knows its token, and forgets all when its process
ends. What is kept where, and how long, is its users' to say.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Iterable, Mapping
from mmap import mmap
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from raymega.errors import StorageError
from raymega.glibc import map_blocks_from
from raymega.storage.keys import check_key
from raymega.storage.shared_memory import attach

SCHEMA = pa.schema([("bytes", pa.uint8())])
"""An object travels as batches of one column."""
ABSENT, TAKEN, UNSEEN = b"absent", b"taken", b"unseen"
"""What an error's ``extra_info`` says where the client must tell one from another."""
TOKEN_HEADER = "x-raymega-token"
MAPPED_BYTES = 2**16
"""glibc's number for the setting, and the size from which on a buffer is returned when it is freed."""
BATCH_BYTES = 2**22
"""An object travels in messages of this size."""


def batch_of(data: pa.Buffer) -> pa.RecordBatch:
    """``data`` as a batch, without a copy."""
    column = pa.Array.from_buffers(pa.uint8(), data.size, [None, data])
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def buffer_of(batch: pa.RecordBatch) -> pa.Buffer:
    """Inverse of :func:`batch_of`, without a copy too."""
    column = batch.column(0)
    return column.buffers()[1].slice(column.offset, len(column))


def give_memory_back() -> None:
    """Have the system get freed memory at once, in a process that does nothing but keep.

    Messages arrive in buffers of gRPC's, which glibc would hold on to in many small heaps; without
    this a keeper takes up to twice what it keeps.
    """
    map_blocks_from(MAPPED_BYTES)


def _memory(num_bytes: int) -> pa.Buffer:
    """Pages of an object's own, which the system has back as soon as the object is dropped.

    What arrives lies in pieces among others in the allocators of gRPC and Arrow, which keep what is
    freed in between: held as it came, objects that come and go took four times their size.
    """
    return pa.py_buffer(mmap(-1, num_bytes) if num_bytes else b"")


class MemoryStoreServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Serves from its construction on; ``uri`` is where. Handlers run in threads of Flight's own."""

    def __init__(self, host: str, token: str) -> None:
        """Listen on a fresh port of ``host`` for callers that send ``token``."""
        self._objects: dict[str, pa.Table] = {}
        self._lock = Lock()
        middleware = {"token": _TokenCheck(token)}
        super().__init__((host, 0), middleware=middleware)
        self.uri = f"{'[' + host + ']' if ':' in host else host}:{self.port}"

    def do_put(self, _context: Any, descriptor: Any, reader: Any, _writer: Any) -> None:
        """Take an object in; it is visible when it is whole.

        What the order calls its ``tail`` stays where it lies in the sender's shared memory.
        """
        order = json.loads(descriptor.command)
        key = _checked(order["key"])
        arrived = _memory(order["num_bytes"])
        num_bytes = _fill(arrived, (buffer_of(chunk.data) for chunk in reader))
        if num_bytes != arrived.size:
            raise flight.FlightServerError(f"{num_bytes} bytes came of {key}, not {arrived.size}")
        tail = [_seen(order["tail"])] if order.get("tail") else []
        whole = pa.Table.from_batches(map(batch_of, (arrived, *tail)))
        with self._lock:
            if not order["overwrite"] and key in self._objects:
                raise flight.FlightServerError(key, TAKEN)
            self._objects[key] = whole

    def do_get(self, _context: Any, ticket: Any) -> Any:
        """Send a range of an object."""
        order = json.loads(ticket.ticket)
        num_bytes = None if order["num_bytes"] < 0 else order["num_bytes"]
        found = self._find(order["key"]).slice(order["start"], num_bytes)
        batches = found.to_batches(max_chunksize=BATCH_BYTES)
        return flight.RecordBatchStream(pa.Table.from_batches(batches, schema=SCHEMA))

    def do_action(self, _context: Any, action: Any) -> list[bytes]:
        """Everything that moves no data: ``size``, ``list``, ``drop``, ``clear``."""
        handlers: Mapping[str, Callable[[Any], object]] = {
            "size": lambda key: self._find(key).num_rows,
            "list": self._list,
            "drop": self._drop,
            "clear": lambda prefix: self._drop(self._list(prefix)),
        }
        answer = handlers[action.type](json.loads(action.body.to_pybytes()))
        return [json.dumps(answer).encode()]

    def _find(self, key: str) -> pa.Table:
        with self._lock:
            if key in self._objects:
                return self._objects[key]
        raise flight.FlightServerError(key, ABSENT)

    def _list(self, prefix: str) -> list[str]:
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def _drop(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)


def _seen(tail: Mapping[str, int | str]) -> pa.Buffer:
    try:
        return pa.py_buffer(attach(tail))
    except OSError as error:
        raise flight.FlightServerError(str(error), UNSEEN) from error


def _fill(target: pa.Buffer, pieces: Iterable[pa.Buffer]) -> int:
    """Lay ``pieces`` end to end, and return how many bytes they have, at most one piece too many."""
    room = np.frombuffer(target, dtype=np.uint8)
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.size
        if end > room.size:
            break
        room[begin:end] = np.frombuffer(piece, dtype=np.uint8)  # numpy lets other threads run
    return end


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """Lets a call through that carries the token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    def start_call(self, _info: Any, headers: Mapping[str, list[str]]) -> None:
        given = "".join(headers.get(TOKEN_HEADER, [])).encode()
        if not hmac.compare_digest(given, self._token):
            raise flight.FlightUnauthenticatedError("the token is not this keeper's")


def _checked(key: str) -> str:
    try:
        return check_key(key)
    except StorageError as error:
        raise flight.FlightServerError(str(error)) from error
