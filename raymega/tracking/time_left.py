"""Estimates the time that a run still takes, from the duration of its latest steps."""

from __future__ import annotations

from collections import deque
from statistics import fmean

from raymega.events import AttemptStarted, RunEvent, RunStarted, StepFinished

WINDOW = 20
"""Number of the latest steps whose mean is taken."""


class TimeLeft:
    """The time left of one run; tell it every event."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self._total_steps = self._step = 0
        self._is_first_step = True

    def observe(self, event: RunEvent) -> None:
        """Take a step's duration; the first one of an attempt, which compiles and warms up, is left out."""
        match event:
            case RunStarted():
                self._total_steps, self._step = event.total_steps, event.step
            case AttemptStarted():
                self._is_first_step = True
            case StepFinished():
                self._step = event.step
                step_s = event.metrics.get("train/step_time_s")
                if step_s is not None and not self._is_first_step:
                    self._steps_s.append(step_s)
                self._is_first_step = False

    @property
    def seconds(self) -> float:
        """Seconds until the last step is done; 0 while none is known, and at the end."""
        if not self._steps_s:
            return 0.0
        return max(0, self._total_steps - self._step) * fmean(self._steps_s)
