"""ProgressReporter: a worker's sign of life inside something that may take longer than a step should.

It says that work goes on, to whoever waits for the rank; what the work is, is its callers' business.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from raymega.messages import Channel, Working

INTERVAL_S = 1.0


class ProgressReporter:
    """Called after each portion of work, from any thread; reports at most once in INTERVAL_S."""

    def __init__(
        self, channel: Channel, rank: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel, self._rank, self._clock = channel, rank, clock
        self._last_s = clock()

    def __call__(self) -> None:
        """A portion is done."""
        now_s = self._clock()
        if now_s - self._last_s >= INTERVAL_S:
            self._last_s = now_s
            self._channel.report(Working(rank=self._rank))
