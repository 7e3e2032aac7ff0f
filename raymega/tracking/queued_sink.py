"""QueuedSink hands events to a tracker from a thread of its own, so that no tracker can stall a run.

Queue, retries and limits are here, and which steps of a long run are recorded; a Recorder writes the records.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from threading import Event, Lock, Thread
from typing import Protocol

from raymega.events import (
    AttemptFailed,
    AttemptStarted,
    ExpertLoads,
    Memory,
    NodesChecked,
    RunEvent,
    RunFinished,
    RunStarted,
    StepFinished,
    Timeline,
    WorkersStarted,
)
from raymega.tracking.sink import Stamped

ALL_STEPS = 1000
"""Number of first steps that are all recorded; a curve needs fewer of those that follow."""
MAX_PENDING_EVENTS = 20_000
MAX_STEPS_PER_REQUEST = 50
MAX_RETRY_WAIT_S = 60.0
STARTING_EVENTS = (RunStarted, AttemptStarted, WorkersStarted, NodesChecked)
"""Events before the first step, which can wait a moment for it."""
KEPT_EVENTS = (RunStarted, AttemptStarted, RunFinished)
"""Events without which a tracker cannot place the others: a full queue keeps them."""

log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Writer of one run's records to one tracker; every call comes from the sink's thread and may block."""

    def record(self, batch: Sequence[Stamped]) -> None:
        """Write one event, or several consecutive StepFinished; raise OSError to be called again."""

    def close(self) -> None:
        """Release resources; called once, after the last record."""

    def is_refusal(self, error: Exception) -> bool:
        """Return whether an error of ``record`` would come again at the next try; it does not block."""


def is_local_refusal(error: Exception) -> bool:
    """Return whether an error would come again at the next try; other OSErrors are connections."""
    local = (FileNotFoundError, IsADirectoryError, PermissionError)
    return isinstance(error, local) or not isinstance(error, OSError)


class QueuedSink:
    """Sink for one run in one tracker.

    ``emit`` only queues. The thread writes steps every ``flush_s`` seconds and other events at once.
    While the tracker is unavailable it retries with growing waits; when the bounded queue is full, the
    oldest step records are dropped.
    """

    def __init__(
        self,
        open_recorder: Callable[[], Recorder],
        *,
        title: str,
        clock: Callable[[], float],
        every: int = 0,
        flush_s: float = 2.0,
        start_patience_s: float = 0.0,
    ) -> None:
        """Start the thread.

        Args:
            open_recorder: Function that imports the tracker's package and returns its recorder; the thread
                calls it with the first record.
            title: Name of the tracker in log lines.
            clock: Clock in seconds since the epoch, for the records' timestamps.
            every: Steps between recorded steps; see :func:`interval`.
            flush_s: Maximum time in seconds that a step record waits while the tracker answers.
            start_patience_s: Maximum time in seconds that records wait for the first step, or a failure, so
                that importing a package does not take time from the start of the workers.
        """
        self._open_recorder = open_recorder
        self._title = title
        self._clock = clock
        self._flush_s = flush_s
        self._thinner = Thinner(every)
        self._buffer = EventBuffer(MAX_PENDING_EVENTS)
        self._recorder: Recorder | None = None
        self._start_patience_s = start_patience_s
        self._has_begun = Event()
        self._wake = Event()
        self._has_ended = Event()
        self._closing = Event()
        self._num_in_flight = 0
        self._is_away = False
        self._is_off = False
        self._thread = Thread(target=self._work, name=f"sink of {title}", daemon=True)
        self._thread.start()

    @property
    def recorder(self) -> Recorder | None:
        """Return the recorder; None before the thread has opened it."""
        return self._recorder

    def emit(self, event: RunEvent) -> None:
        """Queue the event and return at once."""
        if self._is_off:
            return
        for kept in self._thinner.keep(event):
            self._buffer.put(Stamped(time_s=self._clock(), event=kept))
        if not isinstance(event, STARTING_EVENTS):
            self._has_begun.set()
        # The last event: trackers end side by side, not one after the other.
        if isinstance(event, RunFinished):
            self._has_ended.set()
        # Steps come often and can wait for the next flush.
        if not isinstance(event, StepFinished):
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Let the thread write what is queued, for at most ``timeout_s``, and log how many records are missing."""
        # wake the thread, which then drains the queue once more
        self._has_begun.set()
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        # still queued, dropped for want of room, or in a request that did not return
        num_missing = len(self._buffer) + self._buffer.num_dropped + self._num_in_flight
        if not self._is_off and (num_missing or self._thread.is_alive()):
            log.warning(
                "%s lacks %d records after %.0f s of closing; metrics.jsonl has all of them",
                self._title,
                num_missing,
                timeout_s,
            )

    def _work(self) -> None:
        """Run the thread: write the queue and wait, until closed or until the tracker refuses the run."""
        self._has_begun.wait(self._start_patience_s)
        wait_s = self._flush_s
        is_last = False
        while not (is_last or self._is_off):
            # Read before the drain: what was queued before close() is still written.
            is_last, has_ended = self._closing.is_set(), self._has_ended.is_set()
            is_empty = self._drain()
            is_last |= is_empty and has_ended
            wait_s = self._flush_s if is_empty else min(2 * wait_s, MAX_RETRY_WAIT_S)
            if not is_last:
                self._wake.wait(wait_s)
                self._wake.clear()
        self._close_recorder()

    def _drain(self) -> bool:
        """Write until the queue is empty; return False when the tracker is unavailable."""
        while batch := self._buffer.pop(MAX_STEPS_PER_REQUEST):
            self._num_in_flight = len(batch)
            try:
                self._record(batch)
            except Exception as error:  # noqa: BLE001 - the thread's edge
                if not self._is_refused(batch, error):
                    self._buffer.give_back(batch)
                    return False
            finally:
                self._num_in_flight = 0
        return True

    def _record(self, batch: Sequence[Stamped]) -> None:
        # The import takes seconds, so it happens here: in the thread, not at the run's start.
        if self._recorder is None:
            self._recorder = self._open_recorder()
        self._recorder.record(batch)
        if self._is_away:
            log.warning("%s answers again", self._title)
        self._is_away = False

    def _close_recorder(self) -> None:
        try:
            if self._recorder is not None:
                self._recorder.close()
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("%s failed to close: %r", self._title, error)

    def _is_refused(self, batch: Sequence[Stamped], error: Exception) -> bool:
        """Log the failure; return True when the tracker refused the batch, so that a retry is useless."""
        judge = self._recorder.is_refusal if self._recorder is not None else is_local_refusal
        if not judge(error):
            if not self._is_away:
                log.warning("%s does not accept records, retrying: %s", self._title, error)
            self._is_away = True
            return False
        name = type(batch[0].event).__name__
        log.warning("%s refused %s: %s", self._title, name, error or repr(error))
        # Without the run there is nothing to write the other records to.
        if isinstance(batch[0].event, RunStarted):
            log.warning("this run is not recorded in %s", self._title)
            self._is_off = True
        return True


class EventBuffer:
    """Bounded FIFO queue of events, safe between threads; it never blocks.

    Step records are dropped first, the oldest before others: they are many, and metrics.jsonl has them.
    """

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self._items: deque[Stamped] = deque()
        self._lock = Lock()
        self._num_dropped = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_dropped(self) -> int:
        """Return the number of records dropped so far."""
        return self._num_dropped

    def put(self, item: Stamped) -> None:
        """Append an event, and drop the oldest step records beyond the limit."""
        with self._lock:
            self._items.append(item)
            self._make_room()

    def pop(self, limit: int) -> list[Stamped]:
        """Remove and return up to ``limit`` consecutive step records from the head, or one other event."""
        with self._lock:
            # Steps share one request; any other event needs its own calls, in its place.
            steps = sum(1 for _ in takewhile(_is_step, islice(self._items, limit)))
            count = min(len(self._items), max(1, steps))
            return [self._items.popleft() for _ in range(count)]

    def give_back(self, batch: Sequence[Stamped]) -> None:
        """Return a batch to the head of the queue, in its order."""
        with self._lock:
            self._items.extendleft(reversed(batch))
            self._make_room()

    def _make_room(self) -> None:
        while len(self._items) > self._max_events:
            index = self._first(_is_step)
            index = self._first(_may_go) if index is None else index
            if index is None:
                return
            del self._items[index]
            self._num_dropped += 1

    def _first(self, is_one: Callable[[Stamped], bool]) -> int | None:
        return next((i for i, item in enumerate(self._items) if is_one(item)), None)


def _is_step(item: Stamped) -> bool:
    return isinstance(item.event, StepFinished)


def _may_go(item: Stamped) -> bool:
    return not isinstance(item.event, KEPT_EVENTS)


def interval(step: int, every: int = 0) -> int:
    """Return the steps between records at ``step``: ``every``, or for 0 a share of the step.

    That is 1 up to step 1,000, 10 up to 10,000, 100 up to 100,000 and so on: 900 records for each power of ten.
    """
    if every:
        return every
    return max(1, int(10 ** len(str(max(step - 1, 0)))) // ALL_STEPS)


class Thinner:
    """Filter of a run's events for a record by interval; used from one thread."""

    def __init__(self, every: int = 0) -> None:
        """Keep steps by ``every``, as :func:`interval` has it."""
        self._every = every
        self._held: StepFinished | None = None
        self._last: dict[type, int] = {}

    def keep(self, event: RunEvent) -> list[RunEvent]:
        """Return the events to record now: this one, none, or the last step before it too.

        The last step before a failure or the end is always recorded. Values of single ranks, events of
        timelines and tokens of experts are left out.
        """
        match event:
            case StepFinished():
                is_due = event.step % interval(event.step, self._every) == 0
                self._held = None if is_due else event
                return [event] if is_due else []
            case Memory() | Timeline():
                return self._measured(event)
            case ExpertLoads():
                return []
            case AttemptFailed() | RunFinished() if self._held is not None:
                held, self._held = self._held, None
                return [held, event]
            case _:
                return [event]

    def _measured(self, event: Memory | Timeline) -> list[RunEvent]:
        # these come at intervals of their own, which need not meet those of the steps
        last = self._last.get(type(event), -1)
        if last >= 0 and 0 <= event.step - last < interval(event.step, self._every):
            return []
        self._last[type(event)] = event.step
        if isinstance(event, Timeline):
            event = replace(event, events={}, transfers=())
        return [replace(event, ranks={})]
