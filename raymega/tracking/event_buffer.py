"""A bounded store of events between the control loop and a slow sink's thread.

It owns order, batching and what is given up when a server stays away; it makes no thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from threading import Lock

from raymega.events import RunEvent, StepFinished


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamped:
    """An event and when it was emitted, in seconds since the epoch."""

    time_s: float
    event: RunEvent


class EventBuffer:
    """First in, first out; safe between threads; never blocks.

    Only step records are ever dropped, the oldest first: they are many, and metrics.jsonl has them.
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
        """Step records given up so far."""
        return self._num_dropped

    def put(self, item: Stamped) -> None:
        """Append; makes room when full."""
        with self._lock:
            self._items.append(item)
            self._make_room()

    def pop(self, limit: int) -> list[Stamped]:
        """Remove and return the head: up to ``limit`` step records in a row, or one other event."""
        with self._lock:
            steps = sum(1 for _ in takewhile(_is_step, islice(self._items, limit)))
            count = min(len(self._items), max(1, steps))
            return [self._items.popleft() for _ in range(count)]

    def give_back(self, batch: Sequence[Stamped]) -> None:
        """Put a taken batch at the head again, in its order."""
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
