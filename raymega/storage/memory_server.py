"""The snapshot server: an Arrow Flight server that holds objects in the memory of its process.

It serves the requests of RemoteMemoryStore (``storage/remote_memory_store.py``) to callers that send its
token. All objects are lost when its process ends. Callers decide what is stored and for how long.
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
"""Schema of the record batches in which an object is sent: one column of bytes."""
ABSENT, TAKEN, UNSEEN = b"absent", b"taken", b"unseen"
"""Values of ``extra_info`` in Flight errors that RemoteMemoryStore maps to exceptions of their own."""
TOKEN_HEADER = "x-raymega-token"
MAPPED_BYTES = 2**16
"""Size from which on glibc gets a buffer by mmap and returns it to the system when it is freed."""
BATCH_BYTES = 2**22
"""Size of the messages in which an object is sent, in bytes."""


def batch_of(data: pa.Buffer) -> pa.RecordBatch:
    """Return ``data`` as a record batch, without a copy."""
    column = pa.Array.from_buffers(pa.uint8(), data.size, [None, data])
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def buffer_of(batch: pa.RecordBatch) -> pa.Buffer:
    """Return the bytes of a batch, without a copy; the inverse of :func:`batch_of`."""
    column = batch.column(0)
    return column.buffers()[1].slice(column.offset, len(column))


def give_memory_back() -> None:
    """Make glibc return freed memory to the system at once; for a process that only runs a snapshot server.

    Messages arrive in gRPC's buffers, which glibc would retain in many small heaps when they are freed.
    Without this setting a snapshot server takes up to twice the size of its objects.
    """
    map_blocks_from(MAPPED_BYTES)


def _memory(num_bytes: int) -> pa.Buffer:
    """Return a buffer of pages mapped for one object, which are released when the object is dropped.

    The buffers in which messages arrive share the heaps of gRPC and Arrow, which retain what is freed
    between them. Objects kept in those buffers and replaced repeatedly took four times their size.
    """
    return pa.py_buffer(mmap(-1, num_bytes) if num_bytes else b"")


class MemoryStoreServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """A snapshot server that serves from its construction on, at ``uri`` (host:port), in Flight's own threads."""

    def __init__(
        self,
        host: str,
        token: str,
        *,
        questions: Mapping[str, Callable[[Any, Any], object]] | None = None,
    ) -> None:
        """Listen on a free port of ``host`` for callers that send ``token``.

        Args:
            host: Address to listen on.
            token: Secret of the callers.
            questions: Functions of the server's objects, which have ``get``, ``size`` and ``list`` as a Store has,
                and of a JSON value; they return JSON. Each is asked by its name.
        """
        self._questions = dict(questions or {})
        self._objects: dict[str, pa.Table] = {}  # by key
        self._lock = Lock()
        middleware = {"token": _TokenCheck(token)}
        super().__init__((host, 0), middleware=middleware)
        self.uri = f"{'[' + host + ']' if ':' in host else host}:{self.port}"

    def do_put(self, _context: Any, descriptor: Any, reader: Any, _writer: Any) -> None:
        """Store an object, which becomes visible when it is whole.

        The request's ``tail``, if it has one, is mapped from the sender's shared memory, not copied.
        """
        order = json.loads(descriptor.command)
        key = _checked(order["key"])
        # the part that was sent: copied into pages of its own
        arrived = _memory(order["num_bytes"])
        num_bytes = _fill(arrived, (buffer_of(chunk.data) for chunk in reader))
        if num_bytes != arrived.size:
            raise flight.FlightServerError(f"{num_bytes} bytes came of {key}, not {arrived.size}")
        # the part in the sender's shared memory: a view
        tail = [_seen(order["tail"])] if order.get("tail") else []
        whole = pa.Table.from_batches(map(batch_of, (arrived, *tail)))
        with self._lock:
            if not order["overwrite"] and key in self._objects:
                raise flight.FlightServerError(key, TAKEN)
            self._objects[key] = whole

    def do_get(self, _context: Any, ticket: Any) -> Any:
        """Send a range of an object, in messages of at most BATCH_BYTES."""
        order = json.loads(ticket.ticket)
        # a table has one row a byte, so that a slice of rows is a range of bytes
        num_bytes = None if order["num_bytes"] < 0 else order["num_bytes"]
        found = self._find(order["key"]).slice(order["start"], num_bytes)
        batches = found.to_batches(max_chunksize=BATCH_BYTES)
        return flight.RecordBatchStream(pa.Table.from_batches(batches, schema=SCHEMA))

    def do_action(self, _context: Any, action: Any) -> list[bytes]:
        """Answer the requests that carry no object: ``size``, ``list``, ``drop`` and ``clear``."""
        handlers: Mapping[str, Callable[[Any], object]] = {
            "size": lambda key: self._find(key).num_rows,
            "list": self._list,
            "drop": self._drop,
            "clear": lambda prefix: self._drop(self._list(prefix)),
        }
        about = json.loads(action.body.to_pybytes())
        if action.type in handlers:
            answer = handlers[action.type](about)
        elif action.type in self._questions:
            answer = self._questions[action.type](_OwnObjects(self), about)
        else:
            raise flight.FlightServerError(f"{action.type} is no question", ABSENT)
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


class _OwnObjects:
    """The objects of a server for its questions; a missing key raises KeyError."""

    def __init__(self, server: MemoryStoreServer) -> None:
        self._server = server

    def get(self, key: str) -> bytes:
        return b"".join(buffer_of(batch) for batch in self._table(key).to_batches())

    def size(self, key: str) -> int:
        return int(self._table(key).num_rows)

    def list(self, prefix: str) -> list[str]:
        return self._server._list(prefix)

    def _table(self, key: str) -> pa.Table:
        try:
            return self._server._find(key)
        except flight.FlightServerError:
            raise KeyError(key) from None


def _seen(tail: Mapping[str, int | str]) -> pa.Buffer:
    try:
        return pa.py_buffer(attach(tail))
    except OSError as error:
        raise flight.FlightServerError(str(error), UNSEEN) from error


def _fill(target: pa.Buffer, pieces: Iterable[pa.Buffer]) -> int:
    """Copy ``pieces`` end to end into ``target``; return their bytes (too many if they do not fit)."""
    room = np.frombuffer(target, dtype=np.uint8)
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.size
        if end > room.size:
            break
        room[begin:end] = np.frombuffer(piece, dtype=np.uint8)  # numpy releases the GIL
    return end


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """Middleware that refuses each call whose header lacks the token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    def start_call(self, _info: Any, headers: Mapping[str, list[str]]) -> None:
        # compared in constant time, so that response times tell nothing about the token
        given = "".join(headers.get(TOKEN_HEADER, [])).encode()
        if not hmac.compare_digest(given, self._token):
            raise flight.FlightUnauthenticatedError("the token is not this snapshot server's")


def _checked(key: str) -> str:
    try:
        return check_key(key)
    except StorageError as error:
        raise flight.FlightServerError(str(error)) from error
