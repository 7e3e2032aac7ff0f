"""Objects in another process's memory: the Store protocol, spoken with a Keeper.

What a keeper is and how it answers is keeper's. Nothing is tried twice: whoever has other copies
knows better what to do than to wait for a process that may be gone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pyarrow as pa
from pyarrow import flight

from raymega.errors import Fault, StorageError
from raymega.storage import memory_server
from raymega.storage.keys import check_key
from raymega.storage.memory_server import BATCH_BYTES, SCHEMA, TOKEN_HEADER, batch_of, buffer_of
from raymega.storage.shared_memory import SharedMemories, SharedRange

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""Longest wait for one object; the partner of a node that hangs must not hold a rank up for long."""


class RemoteMemoryStore:
    """A connection to the keeper at ``host:port``; made at the first call, safe from any thread."""

    def __init__(
        self,
        address: str,
        token: str,
        *,
        timeout_s: float = TIMEOUT_S,
        shared: SharedMemories | None = None,
    ) -> None:
        """``timeout_s`` bounds each call; objects' ends that lie in ``shared`` are not copied."""
        self._address, self._shared = address, shared
        # A proxy for web pages is in the way of nodes that talk to each other.
        options = [("grpc.enable_http_proxy", 0)]
        self._client = flight.FlightClient(f"grpc://{address}", generic_options=options)
        header = (TOKEN_HEADER.encode(), token.encode())
        self._options = flight.FlightCallOptions(timeout=timeout_s, headers=[header])

    @property
    def uri(self) -> str:
        """Where the keeper is, for messages."""
        return f"keeper at {self._address}"

    @property
    def is_sharing(self) -> bool:
        """The keeper looks into this process's shared memory, as far as is known."""
        return self._shared is not None

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object; with ``overwrite`` false an existing key raises FileExistsError.

        Of chunks at its end that lie in shared memory the keeper gets a view: they must stay as they
        are until the object is dropped. A keeper that cannot see them is sent them, and all later ones.
        """
        pieces = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
        if self._shared is not None:
            num_sent, tail = self._shared.tail_of(pieces)
            try:
                return self._send(key, pieces[:num_sent], tail, overwrite=overwrite)
            except _UnseenError as error:
                log.warning(
                    "snapshots are copied to the %s, which takes more memory: %s", self.uri, error
                )
                self._shared = None
        return self._send(key, pieces, None, overwrite=overwrite)

    def _send(
        self, key: str, pieces: list[memoryview], tail: SharedRange | None, *, overwrite: bool
    ) -> None:
        num_bytes = sum(piece.nbytes for piece in pieces)
        order = {"key": check_key(key), "num_bytes": num_bytes, "overwrite": overwrite}
        if tail is not None:
            order["tail"] = asdict(tail)
        target = flight.FlightDescriptor.for_command(json.dumps(order))
        with self._failures("put", key):
            writer, _ = self._client.do_put(target, SCHEMA, self._options)
            try:
                for batch in _batches(pieces):
                    writer.write_batch(batch)
            finally:
                writer.close()  # waits for the keeper's answer, and raises it

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Read bytes [start, start + num_bytes), fewer at the end; -1 is to the end."""
        order = {"key": check_key(key), "start": start, "num_bytes": num_bytes}
        with self._failures("get", key):
            reader = self._client.do_get(flight.Ticket(json.dumps(order)), self._options)
            return b"".join(buffer_of(chunk.data) for chunk in reader)

    def size(self, key: str) -> int:
        """Length of an object in bytes."""
        return int(self._ask("size", check_key(key)))

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with ``prefix``, in order."""
        yield from self._ask("list", prefix)

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is no error."""
        self.drop([check_key(key)])

    def drop(self, keys: Iterable[str]) -> None:
        """Remove many objects in one call."""
        self._ask("drop", list(keys))

    def clear(self, prefix: str) -> None:
        """Remove all objects whose keys begin with ``prefix``."""
        self._ask("clear", prefix)

    def _ask(self, question: str, about: object) -> Any:
        action = flight.Action(question, json.dumps(about).encode())
        with self._failures(question, about):
            (answer,) = self._client.do_action(action, self._options)
        return json.loads(answer.body.to_pybytes())

    @contextmanager
    def _failures(self, operation: str, about: object) -> Iterator[None]:
        try:
            yield
        except (flight.FlightError, pa.ArrowException) as error:
            match getattr(error, "extra_info", b""):
                case memory_server.ABSENT:
                    raise KeyError(about) from None
                case memory_server.TAKEN:
                    raise FileExistsError(about) from None
                case memory_server.UNSEEN:
                    raise _UnseenError(str(error).partition(". Detail:")[0]) from None
            cause = str(error).partition(". gRPC client debug context")[0]
            raise StorageError(
                Fault(
                    fact=f"{operation} of {about!r}: the {self.uri} does not serve it ({cause})",
                    rule="a keeper must live and know its caller's token",
                    remedy="another copy is used; the next attempt starts the keeper anew",
                )
            ) from error


class _UnseenError(Exception):
    """The keeper does not see this process's memory."""


def _batches(pieces: Iterable[memoryview]) -> Iterator[pa.RecordBatch]:
    """Small pieces joined, which costs a copy of them; large ones as they are."""
    small = bytearray()
    for piece in pieces:
        if len(small) + piece.nbytes <= BATCH_BYTES:
            small += piece
            continue
        if small:
            yield batch_of(pa.py_buffer(small))
            small = bytearray()
        for start in range(0, piece.nbytes, BATCH_BYTES):
            yield batch_of(pa.py_buffer(piece[start : start + BATCH_BYTES]))
    if small:
        yield batch_of(pa.py_buffer(small))
