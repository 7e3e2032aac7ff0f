"""CommLog: when the collectives of a recorded step ran, and how long the step stood still for them.

On a CPU the host's clock is read, by whoever completes an operation. On a GPU the host only queues
work, so events on streams are: a side stream waits for the operation, so that its end is marked
without holding up the stream that computes. Which of the two it is, is decided in one place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from raymega.parallel.comm.work import Work
from raymega.schedule.timeline import Event


class Waitable(Protocol):
    """An operation under way."""

    def wait(self, timeout_s: float) -> None:
        """Return when it is complete, on a GPU when the current stream is ordered behind it."""


class Numbered(Protocol):
    """A bucket, as far as a trace knows it: its number and its model chunk."""

    @property
    def index(self) -> int:
        """Number among the rank's buckets."""

    @property
    def chunk(self) -> int:
        """Model chunk whose parameters it holds."""


class CommLog:
    """Events of one step: ``reduce 3`` from launch to completion, ``wait_reduce 3`` while waited for.

    The micro-batch of an event is the number of its bucket; transfers between context-parallel
    ranks, between experts and in the update have no bucket, and those of a name are counted from 0.
    """

    def __init__(self) -> None:
        self._flights: list[_Flight | _GpuFlight] = []
        self._numbers = Counter[str]()
        self._origin: _Origin | None = None
        self._is_open = False
        self._sent_bytes = Counter[str]()

    def new_step(self) -> None:
        """A step begins, recorded or not; what was paused is over, if its update was left out."""
        self._sent_bytes.clear()
        self._origin, self._is_open = None, False

    def sent_bytes(self, names: Collection[str]) -> int:
        """What this rank has sent in transfers of ``names`` since :meth:`new_step`."""
        return sum(self._sent_bytes[name] for name in names)

    def start(self) -> None:
        """Record from now on, which is time 0."""
        self._flights, self._numbers = [], Counter()
        self._origin, self._is_open = _Origin(), True

    def track(self, name: str, bucket: Numbered, pending: Work) -> Waitable:
        """Watch an operation that was just launched, if a step is being recorded."""
        return self._watch(name, (bucket.index, bucket.chunk), pending)

    def track_transfer(self, name: str, pending: Work, *, sent_bytes: int) -> Waitable:
        """The same for a transfer of activations, in which this rank sends so much."""
        self._sent_bytes[name] += sent_bytes
        number = self._numbers[name]
        self._numbers[name] += 1
        return self._watch(name, (number, 0), pending)

    def _watch(self, name: str, at: tuple[int, int], pending: Work) -> Waitable:
        if not self._is_open or self._origin is None or pending.is_idle:
            return pending
        kind = _GpuFlight if self._origin.marker is not None else _Flight
        flight = kind(name, at, pending, self._origin)
        self._flights.append(flight)
        return flight

    def pause(self, work: Sequence[Event], *, began_s: float) -> tuple[Event, ...]:
        """Pause recording; the time line of ``work`` and of what was tracked beside it.

        Args:
            work: Events in seconds since ``began_s``; empty if nothing was recorded.
            began_s: A reading of the host's clock.

        Returns:
            All events in seconds since :meth:`start`, those of ``work`` first.
        """
        if self._origin is None:
            return tuple(work)
        shift = self._origin.of_host(began_s)
        shifted = [e._replace(start_s=e.start_s + shift, end_s=e.end_s + shift) for e in work]
        return (*shifted, *self._seen())

    @contextmanager
    def rest(self) -> Iterator[list[Event]]:
        """Go on with what was paused; the list has what was tracked in between when that is over."""
        events: list[Event] = []
        self._is_open = self._origin is not None
        try:
            yield events
        finally:
            events.extend(self._seen())
            self._origin = None

    def _seen(self) -> list[Event]:
        tracked = [event for flight in self._flights for event in flight.events()]
        self._flights, self._is_open = [], False
        return sorted(tracked, key=lambda event: event.start_s)


class _Origin:
    """Time 0 of a recording: a reading of the clock, and on a GPU an event at the same moment."""

    def __init__(self) -> None:
        self.marker: torch.cuda.Event | None = None
        self.side: torch.cuda.Stream | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self.marker, self.side = _mark(), torch.cuda.Stream()
        self._began = time.perf_counter()

    def now(self) -> float:
        return self.of_host(time.perf_counter())

    def of_host(self, reading: float) -> float:
        return reading - self._began

    def of(self, event: torch.cuda.Event) -> float:
        assert self.marker is not None, "events are compared on a GPU only"
        return self.marker.elapsed_time(event) / 1e3


class _Flight:
    """Watches an operation by the host's clock, and lets go of its tensors when it was waited for."""

    def __init__(self, name: str, at: tuple[int, int], pending: Work, origin: _Origin) -> None:
        self._name, self._at, self._origin = name, at, origin
        self._pending: Work | None = pending
        self._waited: list[tuple[float, float]] = []
        self._launched_s = origin.of_host(pending.launched_s)
        # The callback must not hold this object: the operation would keep itself and its tensors.
        self._done_s = done_s = list[float]()
        with suppress(RuntimeError):  # a reduce-scatter over gloo has nobody to tell
            pending.on_done(lambda: done_s.append(origin.now()))

    def wait(self, timeout_s: float) -> None:
        """Return when it is complete."""
        begin_s = self._origin.now()
        if self._pending is not None:
            self._pending.wait(timeout_s)
        self._pending = None
        self._waited.append((begin_s, self._origin.now()))

    def events(self) -> list[Event]:
        """What was seen; the end is that of the wait if nobody reported it."""
        end_s = max(self._done_s or (end for _, end in self._waited), default=self._launched_s)
        return [
            Event(self._name, *self._at, self._launched_s, end_s),
            *(Event(f"wait_{self._name}", *self._at, begin, end) for begin, end in self._waited),
        ]


class _GpuFlight:
    """Watches an operation by events on streams; nothing here makes the host wait."""

    def __init__(self, name: str, at: tuple[int, int], pending: Work, origin: _Origin) -> None:
        self._name, self._at, self._origin = name, at, origin
        self._pending: Work | None = pending
        self._launched = _mark()
        self._waited: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        with torch.cuda.stream(origin.side):
            pending.wait(0.0)
            self._done = _mark()

    def wait(self, timeout_s: float) -> None:
        """Order the current stream behind it."""
        before = _mark()
        if self._pending is not None:
            self._pending.wait(timeout_s)
        self._pending = None
        self._waited.append((before, _mark()))

    def events(self) -> list[Event]:
        """What the streams did; waits for the device."""
        torch.cuda.synchronize()
        at, time_of = self._at, self._origin.of
        return [
            Event(self._name, *at, time_of(self._launched), time_of(self._done)),
            *(
                Event(f"wait_{self._name}", *at, time_of(before), time_of(after))
                for before, after in self._waited
            ),
        ]


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
