"""MlflowSink hands events to MLflow from a thread of its own, so that no server can stall a run.

Queue, retries and limits are here; `tracking/mlflow_recorder.py` writes the records.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from raymega.events import (
    AttemptStarted,
    NodesChecked,
    RunEvent,
    RunStarted,
    StepFinished,
    WorkersStarted,
)
from raymega.tracking.sink import Stamped

if TYPE_CHECKING:
    from raymega.tracking.mlflow_recorder import Recorder

# Limits. mlflow's own retries are off: the thread retries with growing waits.
MAX_PENDING_EVENTS = 20_000
MAX_STEPS_PER_REQUEST = 50
MAX_RETRY_WAIT_S = 60.0
HTTP_TIMEOUT_S = 10
HTTP_MAX_RETRIES = 0
STARTING_EVENTS = (RunStarted, AttemptStarted, WorkersStarted, NodesChecked)
"""Events before the first step, which can wait a moment for it."""

log = logging.getLogger(__name__)


def tracking_uri(setting: str, folder: Path) -> str:
    """Return the URI that ``tracking.mlflow_uri`` means; ``run`` is a sqlite file in ``folder``."""
    if setting != "run":
        return setting
    return f"sqlite:///{folder.expanduser().resolve() / 'mlflow.db'}"


class MlflowSink:
    """Sink for one run in one MLflow server or database.

    ``emit`` only queues. The thread writes steps every ``flush_s`` seconds and other events at once.
    While the server is unavailable it retries with growing waits; when the bounded queue is full, the
    oldest step records are dropped.
    """

    def __init__(
        self,
        *,
        uri: str,
        experiment: str,
        clock: Callable[[], float],
        flush_s: float = 2.0,
        start_patience_s: float = 0.0,
    ) -> None:
        """Start the thread.

        Args:
            uri: Tracking URI of MLflow.
            experiment: Name of the experiment; created if missing.
            clock: Clock in seconds since the epoch, for the records' timestamps.
            flush_s: Maximum time in seconds that a step record waits while the server answers.
            start_patience_s: Maximum time in seconds that records wait for the first step, or a failure, so
                that importing MLflow does not take time from the start of the workers.
        """
        self._uri = uri
        self._experiment = experiment
        self._clock = clock
        self._flush_s = flush_s
        self._buffer = EventBuffer(MAX_PENDING_EVENTS)
        self._recorder: Recorder | None = None
        self._start_patience_s = start_patience_s
        self._has_begun = Event()
        self._wake = Event()
        self._closing = Event()
        self._num_in_flight = 0
        self._is_away = False
        self._is_off = False
        self._thread = Thread(target=self._work, name="mlflow-sink", daemon=True)
        self._thread.start()

    @property
    def run_id(self) -> str:
        """Return MLflow's id of the parent run; empty until the thread has created or found it."""
        return "" if self._recorder is None else self._recorder.run_id

    def emit(self, event: RunEvent) -> None:
        """Queue the event and return at once."""
        if self._is_off:
            return
        self._buffer.put(Stamped(time_s=self._clock(), event=event))
        if not isinstance(event, STARTING_EVENTS):
            self._has_begun.set()
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
                "MLflow at %s lacks %d records after %.0f s of closing; metrics.jsonl has all of them",
                self._uri,
                num_missing,
                timeout_s,
            )

    def _work(self) -> None:
        """Run the thread: write the queue and wait, until closed or until MLflow refuses the run."""
        self._has_begun.wait(self._start_patience_s)
        wait_s = self._flush_s
        is_last = False
        while not (is_last or self._is_off):
            # Read before the drain: what was queued before close() is still written.
            is_last = self._closing.is_set()
            wait_s = self._flush_s if self._drain() else min(2 * wait_s, MAX_RETRY_WAIT_S)
            if not is_last:
                self._wake.wait(wait_s)
                self._wake.clear()

    def _drain(self) -> bool:
        """Write until the queue is empty; return False when the server is unavailable."""
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
        from raymega.tracking import mlflow_recorder

        if self._recorder is None:
            mlflow_recorder.limit_client(timeout_s=HTTP_TIMEOUT_S, max_retries=HTTP_MAX_RETRIES)
            self._recorder = mlflow_recorder.Recorder(uri=self._uri, experiment=self._experiment)
        self._recorder.record(batch)
        if self._is_away:
            log.warning("MLflow at %s answers again", self._uri)
        self._is_away = False

    def _is_refused(self, batch: Sequence[Stamped], error: Exception) -> bool:
        """Log the failure; return True when MLflow refused the batch, so that a retry is useless."""
        from raymega.tracking.mlflow_recorder import is_refusal

        if not is_refusal(error):
            if not self._is_away:
                log.warning("MLflow at %s does not accept records, retrying: %s", self._uri, error)
            self._is_away = True
            return False
        log.warning("MLflow refused %s: %s", type(batch[0].event).__name__, error)
        # Without its parent run there is nothing to write the other records to.
        if isinstance(batch[0].event, RunStarted):
            log.warning("this run is not recorded in MLflow at %s", self._uri)
            self._is_off = True
        return True


class EventBuffer:
    """Bounded FIFO queue of events, safe between threads; it never blocks.

    Only step records are dropped, the oldest first: they are many, and metrics.jsonl has them.
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
        """Return the number of step records dropped so far."""
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
            index = next((i for i, item in enumerate(self._items) if _is_step(item)), None)
            if index is None:
                return
            del self._items[index]
            self._num_dropped += 1


def _is_step(item: Stamped) -> bool:
    return isinstance(item.event, StepFinished)
