"""RateLimiter: lets the bytes of a save through no faster than the job allows.

It holds bytes back before they are handed to the store. What the store then does with them, and what
the network's own limits are, it does not know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Lock

PIECE_BYTES = 16 << 20
"""Longest stretch that is passed on at once."""
PIECES_PER_S = 10


class RateLimiter:
    """One for all files that a rank writes at the same time; safe to use from several threads."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``bytes_per_s`` 0 is no limit."""
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._piece_bytes = PIECE_BYTES
        if bytes_per_s:
            self._piece_bytes = max(1, min(PIECE_BYTES, bytes_per_s // PIECES_PER_S))
        self._free_s = clock()
        self._lock = Lock()

    def pass_on(self, chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
        """The same bytes in pieces, each when its turn has come."""
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                piece, rest = rest[: self._piece_bytes], rest[self._piece_bytes :]
                self._wait_for(len(piece))
                yield piece

    def _wait_for(self, num_bytes: int) -> None:
        """A piece goes when the time of all before it, and its own, has passed."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = self._clock()
            self._free_s = max(self._free_s, now) + num_bytes / self._bytes_per_s
            pause_s = self._free_s - now
        self._sleep(pause_s)
