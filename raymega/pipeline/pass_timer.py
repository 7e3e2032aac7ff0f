"""Measures the device time of a rank's passes, by which slow GPUs are found.

The host only queues a GPU's work, so its own clock says nothing about kernels. Events in the stream mark where
each pass begins and ends. They cost the host some microseconds, and the device nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class DeviceEvent(Protocol):
    """Mark in a stream, as ``torch.cuda.Event`` with ``enable_timing``."""

    def record(self) -> None:
        """Put the mark behind the work that is queued so far."""

    def synchronize(self) -> None:
        """Wait until the device has reached the mark."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds between this mark and a later one."""


class PassTimer:
    """Timer of the forward and backward passes of a step.

    Waits for messages between stages lie between passes and do not count. Collectives inside a pass count
    with their waits: a slow rank makes the ranks of its tensor-parallel group slow too.
    """

    def __init__(self, make_event: Callable[[], DeviceEvent] | None) -> None:
        """Measure with events of ``make_event``, which are used again in each step; None measures nothing."""
        self._make_event = make_event
        self._events: list[tuple[DeviceEvent, DeviceEvent]] = []
        self._num_passes = 0

    @classmethod
    def of(cls, device: torch.device) -> PassTimer:
        """Return the timer of a rank on ``device``: on a GPU one that measures."""
        if device.type != "cuda":
            return cls(None)
        return cls(lambda: torch.cuda.Event(enable_timing=True))

    def begin_step(self) -> None:
        """Forget the passes so far."""
        self._num_passes = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the device work that the body queues as one pass."""
        if self._make_event is None:
            yield
            return
        # events of earlier steps are used again; a longer step makes more
        if self._num_passes == len(self._events):
            self._events.append((self._make_event(), self._make_event()))
        begin, end = self._events[self._num_passes]
        self._num_passes += 1
        begin.record()
        yield
        end.record()

    def seconds(self) -> float | None:
        """Return the device time of the step's passes; None without a device or a pass. Waits for the last one."""
        passes = self._events[: self._num_passes]
        if not passes:
            return None
        passes[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in passes) / 1000
