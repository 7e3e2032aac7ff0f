"""RateLimiter: limits the rate at which the bytes of a save are handed to the store.

It knows neither how the store sends them nor the limits of the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Lock

PIECE_BYTES = 16 << 20
"""Largest piece in bytes that is passed on at once."""
PIECES_PER_S = 10
"""Lowest number of pieces in a second: at a low rate pieces are smaller, so that pauses stay short."""


class RateLimiter:
    """Rate limit shared by all files that a rank writes at the same time; thread-safe."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Limit to ``bytes_per_s`` bytes a second; 0 is no limit."""
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._piece_bytes = PIECE_BYTES
        if bytes_per_s:
            self._piece_bytes = max(1, min(PIECE_BYTES, bytes_per_s // PIECES_PER_S))
        self._free_s = clock()
        self._lock = Lock()

    def pass_on(self, chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
        """Yield the bytes of ``chunks`` in pieces, each as late as the rate requires."""
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                piece, rest = rest[: self._piece_bytes], rest[self._piece_bytes :]
                self._wait_for(len(piece))
                yield piece

    def _wait_for(self, num_bytes: int) -> None:
        """Sleep until ``num_bytes`` more may pass."""
        if not self._bytes_per_s:
            return
        # Reserve the next interval under the lock, and sleep outside it.
        with self._lock:
            now = self._clock()
            self._free_s = max(self._free_s, now) + num_bytes / self._bytes_per_s
            pause_s = self._free_s - now
        self._sleep(pause_s)
