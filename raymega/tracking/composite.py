"""CompositeSink: one sink for the controller, several behind it, none able to hurt the run.

It owns isolation only; which sinks a run has is the api's choice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from raymega.tracking.sink import RunEvent, Sink

log = logging.getLogger(__name__)


class CompositeSink:
    """Hands every event to every sink, in order; a sink that raises is let go with one log line."""

    def __init__(
        self, sinks: Sequence[Sink], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sinks = list(sinks)
        self._clock = clock

    def emit(self, event: RunEvent) -> None:
        """Never raises; takes as long as its sinks together."""
        for sink in tuple(self._sinks):
            try:
                sink.emit(event)
            except Exception as error:  # noqa: BLE001 - the run's edge: watching must not stop it
                self._sinks.remove(sink)
                log.warning("%s failed and gets no more events: %r", _name(sink), error)

    def close(self, timeout_s: float) -> None:
        """Close the sinks in order within ``timeout_s`` together; never raises."""
        deadline = self._clock() + timeout_s
        for sink in self._sinks:
            try:
                sink.close(max(0.0, deadline - self._clock()))
            except Exception as error:  # noqa: BLE001 - as above
                log.warning("%s failed to close: %r", _name(sink), error)


def _name(sink: Sink) -> str:
    return type(sink).__name__
