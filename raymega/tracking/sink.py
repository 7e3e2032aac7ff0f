"""Sink is the protocol of a run's watchers; CompositeSink puts several behind one.

`raymega/events.py` has the events, `tracking/names.py` the metrics that each of them carries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from raymega.events import RunEvent

log = logging.getLogger(__name__)

SINK_CLOSE_S = 30.0
"""Longest seconds for which the end of a run waits for its sinks."""


class Sink(Protocol):
    """Watcher of one run, built before the first event and closed after the last."""

    def emit(self, event: RunEvent) -> None:
        """Process an event.

        The control loop calls it from one thread, in order, at most some ten times a second. It must
        return within a millisecond: anything that can block (network, database) belongs in a thread of
        the sink. The controller holds a CompositeSink, which never raises.
        """

    def close(self, timeout_s: float) -> None:
        """Flush and release resources within ``timeout_s``; called once, after RunFinished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamped:
    """Event with the time of its emission, in seconds since the epoch."""

    time_s: float
    event: RunEvent


class CompositeSink:
    """Sink that hands each event to several sinks in order; one that raises is dropped with a log line."""

    def __init__(
        self, sinks: Sequence[Sink], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sinks = list(sinks)
        self._clock = clock

    def emit(self, event: RunEvent) -> None:
        """Hand the event to every sink; never raise."""
        for sink in tuple(self._sinks):
            try:
                sink.emit(event)
            except Exception as error:  # noqa: BLE001 - the run's edge: watching must not stop it
                self._sinks.remove(sink)
                log.warning("%s failed and gets no more events: %r", _name(sink), error)

    def close(self, timeout_s: float) -> None:
        """Close the sinks in order, within ``timeout_s`` for all of them; never raise."""
        deadline = self._clock() + timeout_s
        for sink in self._sinks:
            try:
                sink.close(max(0.0, deadline - self._clock()))
            except Exception as error:  # noqa: BLE001 - as above
                log.warning("%s failed to close: %r", _name(sink), error)


def _name(sink: Sink) -> str:
    return type(sink).__name__
