"""CommLog: when the collectives of a recorded step ran, and how long the step waited for them.

On a CPU the host's clock is read, in the thread that completes an operation. On a GPU the host only
queues work, so CUDA events are recorded: a side stream waits for the operation and marks its end,
without delaying the compute stream. `_Origin` decides which of the two is used.
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
    """A pending operation."""

    def wait(self, timeout_s: float) -> None:
        """Return when it is complete; on a GPU only order the current stream behind it."""


class Numbered(Protocol):
    """The properties of a bucket that a trace reads: its number and its model chunk."""

    @property
    def index(self) -> int:
        """Number among the rank's buckets."""

    @property
    def chunk(self) -> int:
        """Index of the model chunk whose parameters it holds."""


class CommLog:
    """Events of one step: ``reduce 3`` from launch to completion, ``wait_reduce 3`` for each wait.

    The event's micro-batch number is the number of its bucket. Transfers between context-parallel
    ranks, between experts and in the update have no bucket; each name is numbered from 0.
    """

    def __init__(self) -> None:
        self._flights: list[_Flight | _GpuFlight] = []
        self._numbers = Counter[str]()
        self._origin: _Origin | None = None
        self._is_open = False
        self._sent_bytes = Counter[str]()

    def new_step(self) -> None:
        """Begin a step, recorded or not, and drop a paused recording whose update was skipped."""
        self._sent_bytes.clear()
        self._origin, self._is_open = None, False

    def sent_bytes(self, names: Collection[str]) -> int:
        """Return the bytes that this rank has sent in transfers of ``names`` since :meth:`new_step`."""
        return sum(self._sent_bytes[name] for name in names)

    def start(self) -> None:
        """Start to record; now is time 0 of the events."""
        self._flights, self._numbers = [], Counter()
        self._origin, self._is_open = _Origin(), True

    def track(self, name: str, bucket: Numbered, pending: Work) -> Waitable:
        """Track a collective of a bucket that was just launched, if a step is being recorded."""
        return self._watch(name, (bucket.index, bucket.chunk), pending)

    def track_transfer(self, name: str, pending: Work, *, sent_bytes: int) -> Waitable:
        """Track a transfer without a bucket, and count the ``sent_bytes`` of this rank."""
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
        """Pause recording, and return ``work`` and the operations tracked so far on one time line.

        Args:
            work: Events of the schedule, in seconds since ``began_s``; empty if nothing was recorded.
            began_s: Reading of ``time.perf_counter`` on the host.

        Returns:
            All events in seconds since :meth:`start`, those of ``work`` first.
        """
        if self._origin is None:
            return tuple(work)
        # The schedule's events count from its own start; move them to the log's time 0.
        shift = self._origin.of_host(began_s)
        shifted = [e._replace(start_s=e.start_s + shift, end_s=e.end_s + shift) for e in work]
        return (*shifted, *self._seen())

    @contextmanager
    def rest(self) -> Iterator[list[Event]]:
        """Resume a paused recording; on exit the yielded list holds what was tracked inside."""
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
    """Time 0 of a recording: a reading of the host's clock, and on a GPU a CUDA event at that moment."""

    def __init__(self) -> None:
        self.marker: torch.cuda.Event | None = None
        self.side: torch.cuda.Stream | None = None
        # The device is idle after synchronize, so the event and the clock mark the same moment.
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
    """An operation timed by the host's clock; its tensors are released after the first wait."""

    def __init__(self, name: str, at: tuple[int, int], pending: Work, origin: _Origin) -> None:
        self._name, self._at, self._origin = name, at, origin
        self._pending: Work | None = pending
        self._waited: list[tuple[float, float]] = []
        self._launched_s = origin.of_host(pending.launched_s)
        # The callback must not refer to self: the operation would then keep itself and its tensors.
        self._done_s = done_s = list[float]()
        with suppress(RuntimeError):  # a reduce-scatter over gloo has no future
            pending.on_done(lambda: done_s.append(origin.now()))

    def wait(self, timeout_s: float) -> None:
        """Return when the operation is complete, and record the wait."""
        begin_s = self._origin.now()
        if self._pending is not None:
            self._pending.wait(timeout_s)
        self._pending = None
        self._waited.append((begin_s, self._origin.now()))

    def events(self) -> list[Event]:
        """Return the operation's event and its waits; without a callback it ends with the last wait."""
        # end: the callback's time, else the end of the last wait, else the launch
        end_s = max(self._done_s or (end for _, end in self._waited), default=self._launched_s)
        return [
            Event(self._name, *self._at, self._launched_s, end_s),
            *(Event(f"wait_{self._name}", *self._at, begin, end) for begin, end in self._waited),
        ]


class _GpuFlight:
    """An operation timed by CUDA events; only :meth:`events` makes the host wait."""

    def __init__(self, name: str, at: tuple[int, int], pending: Work, origin: _Origin) -> None:
        self._name, self._at, self._origin = name, at, origin
        self._pending: Work | None = pending
        self._launched = _mark()
        self._waited: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        # The side stream waits for the operation, so its end is marked without a wait on the compute stream. After that
        # wait torch no longer holds the tensors, although nothing orders the compute stream, which may be given their
        # memory, behind the operation (https://github.com/pytorch/pytorch/issues/188655): this object holds them.
        self._keeps_alive = pending.keeps_alive
        with torch.cuda.stream(origin.side):
            pending.wait(0.0)
            self._done = _mark()

    def wait(self, timeout_s: float) -> None:
        """Order the current stream behind the operation, with an event before and one after."""
        before = _mark()
        if self._pending is not None:
            self._pending.wait(timeout_s)
        self._pending = self._keeps_alive = None
        self._waited.append((before, _mark()))

    def events(self) -> list[Event]:
        """Return the operation's event and its waits; the host waits for the device."""
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
