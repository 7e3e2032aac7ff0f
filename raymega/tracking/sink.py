"""What watches a run: the protocol of a sink, several behind one, and which metrics each event carries.

Where events go is each sink's; what they say is raymega.events', the metrics' meaning tracking.names'.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from raymega.events import (
    AttemptStarted,
    CheckpointCommitted,
    Measured,
    Recovered,
    RunEvent,
    RunFinished,
    RunStarted,
    SaveProgress,
    StepFinished,
    WorkersStarted,
)

log = logging.getLogger(__name__)


class Sink(Protocol):
    """A watcher of one run. Built before the first event, closed after the last."""

    def emit(self, event: RunEvent) -> None:
        """Take an event.

        Called by the control loop, from one thread, in order, some ten times a second at most. It
        must return within a millisecond: anything that can block (network, database) happens in
        the sink's own thread. The controller holds a CompositeSink, which never raises.
        """

    def close(self, timeout_s: float) -> None:
        """Flush and let go; called once, after RunFinished. Returns within ``timeout_s``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamped:
    """An event and when it was emitted, in seconds since the epoch."""

    time_s: float
    event: RunEvent


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


def metrics_of(event: RunEvent) -> Mapping[str, float]:
    """The event's metrics by name; empty when it carries none. All are of the event's step; what each
    rank has of its own is ``ranks`` of a Measured."""
    match event:
        case Measured():
            return event.metrics
        case AttemptStarted():
            return {"run/attempt": event.attempt}
        case CheckpointCommitted():
            return {
                "checkpoint/stall_s": event.stall_s,
                "checkpoint/save_s": event.save_s,
                "checkpoint/bytes": event.num_bytes,
                "checkpoint/written_share": 1.0,
            }
        case SaveProgress():
            return {"checkpoint/written_share": event.written_bytes / max(1, event.num_bytes)}
        case Recovered():
            return {
                "run/detection_s": event.detection_s,
                "run/recovery_s": event.recovery_s,
                "run/lost_steps": event.lost_steps,
            }
        case RunFinished():
            return {"run/goodput": event.goodput, "run/wall_s": event.wall_s}
        case _:
            return {}


def standing_metrics_of(event: RunEvent) -> Mapping[str, float]:
    """Where the run stands after the event: what a sink without a step axis shows beside."""
    match event:
        case RunStarted():
            return {
                "run/step": event.step,
                "run/total_steps": event.total_steps,
                "checkpoint/step": event.step,
                "checkpoint/every_steps": _checkpoint_every(event.job),
            }
        case WorkersStarted():
            return {"run/world_size": len(event.pids)}
        case AttemptStarted() | StepFinished():
            return {"run/step": event.step}
        case CheckpointCommitted():
            return {"checkpoint/step": event.step}
        case _:
            return {}


def _checkpoint_every(job: Mapping[str, object]) -> float:
    section = job.get("checkpoint")
    every = section.get("every") if isinstance(section, Mapping) else None
    return every if isinstance(every, int) else 0
