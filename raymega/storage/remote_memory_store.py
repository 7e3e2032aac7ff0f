"""The Store protocol over objects in the memory of another process, a snapshot server.

``storage/memory_server.py`` has the snapshot server. Nothing is retried: its process may be gone, and the caller
can read another copy instead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyarrow import flight

from raymega.errors import StorageError
from raymega.storage import memory_server
from raymega.storage.keys import check_key
from raymega.storage.memory_server import BATCH_BYTES, SCHEMA, TOKEN_HEADER, batch_of, buffer_of
from raymega.storage.shared_memory import SharedMemories, SharedRange

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""Timeout of one call in seconds; a rank must not wait long for a snapshot server whose node hangs."""


class RemoteMemoryStore:
    """A client of the snapshot server at ``host:port``; it connects at the first call and is safe from any thread."""

    def __init__(
        self,
        address: str,
        token: str,
        *,
        timeout_s: float = TIMEOUT_S,
        shared: SharedMemories | None = None,
    ) -> None:
        """Prepare a client without connecting.

        Args:
            address: Address of the snapshot server, ``host:port``.
            token: Secret that the snapshot server checks in each call.
            timeout_s: Longest duration of one call, in seconds.
            shared: Shared memory of this process; chunks at an object's end that lie in it are not copied.
        """
        self._address, self._shared = address, shared
        # gRPC would send traffic between nodes through the proxy of http_proxy.
        self._options_of_client = [("grpc.enable_http_proxy", 0)]
        header = (TOKEN_HEADER.encode(), token.encode())
        self._options = flight.FlightCallOptions(timeout=timeout_s, headers=[header])

    @cached_property
    def _client(self) -> Any:
        # made at the first use: a rank names thousands of servers, and talks to a few
        return flight.FlightClient(
            f"grpc://{self._address}", generic_options=self._options_of_client
        )

    @property
    def uri(self) -> str:
        """Description of the snapshot server with its address, for messages."""
        return f"snapshot server at {self._address}"

    @property
    def is_sharing(self) -> bool:
        """True while the snapshot server maps this process's shared memory; false once it failed to."""
        return self._shared is not None

    def put(self, key: str, chunks: Iterable[bytes | memoryview], *, overwrite: bool) -> None:
        """Write an object; with ``overwrite`` false an existing key raises FileExistsError.

        Chunks at its end that lie in shared memory are not sent: the snapshot server maps them. They must not
        change until the object is dropped. If the snapshot server cannot map them, they are sent, as are those of
        all later objects.
        """
        pieces = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
        # same machine: send the head, and let the snapshot server map the tail
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
        # the request travels as the descriptor, ahead of the batches
        target = flight.FlightDescriptor.for_command(json.dumps(order))
        with self._failures("put", key):
            writer, _ = self._client.do_put(target, SCHEMA, self._options)
            try:
                for batch in _batches(pieces):
                    writer.write_batch(batch)
            finally:
                writer.close()  # waits for the snapshot server's answer, and raises it

    def get(self, key: str, *, start: int = 0, num_bytes: int = -1) -> bytes:
        """Return bytes [start, start + num_bytes), fewer at the object's end; -1 reads to the end."""
        order = {"key": check_key(key), "start": start, "num_bytes": num_bytes}
        with self._failures("get", key):
            reader = self._client.do_get(flight.Ticket(json.dumps(order)), self._options)
            return b"".join(buffer_of(chunk.data) for chunk in reader)

    def size(self, key: str) -> int:
        """Return the length of an object in bytes."""
        return int(self._ask("size", check_key(key)))

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys that begin with ``prefix``, in sorted order."""
        yield from self._ask("list", prefix)

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is no error."""
        self.drop([check_key(key)])

    def drop(self, keys: Iterable[str]) -> None:
        """Remove several objects in one call; missing keys are no error."""
        self._ask("drop", list(keys))

    def clear(self, prefix: str) -> None:
        """Remove all objects whose keys begin with ``prefix``."""
        self._ask("clear", prefix)

    def ask(self, question: str, about: object) -> Any:
        """Return the server's answer to one of its ``questions``; KeyError when it does not know that one."""
        return self._ask(question, about)

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
            # answers with an exception of their own
            match getattr(error, "extra_info", b""):
                case memory_server.ABSENT:
                    raise KeyError(about) from None
                case memory_server.TAKEN:
                    raise FileExistsError(about) from None
                case memory_server.UNSEEN:
                    raise _UnseenError(str(error).partition(". Detail:")[0]) from None
            # everything else; gRPC appends source lines and pointers to its message
            cause = str(error).partition(". gRPC client debug context")[0]
            raise StorageError(
                fact=f"{operation} of {about!r}: the {self.uri} does not serve it ({cause})",
                rule="a snapshot server must live and know its caller's token",
                remedy="another copy is used; the next attempt starts the snapshot server anew",
            ) from error


class _UnseenError(Exception):
    """The snapshot server cannot map this process's shared memory."""


def _batches(pieces: Iterable[memoryview]) -> Iterator[pa.RecordBatch]:
    """Yield ``pieces`` as batches of at most BATCH_BYTES: small ones joined, large ones as views."""
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
