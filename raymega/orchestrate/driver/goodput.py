"""Goodput: the share of a driver's wall time that went into steps that count.

A step counts once, and only if its result is part of the run's surviving history: time of steps
that a failure made to be done again, of starting, restoring, saving and waiting is the rest.
"""

from __future__ import annotations

from array import array


class GoodputMeter:
    """Step times of the surviving history since ``first_step`` completed steps."""

    def __init__(self, *, first_step: int, now_s: float) -> None:
        self._first_step = first_step
        self._begun_s = now_s
        self._step_times_s = array("d")

    def add(self, seconds: float) -> None:
        """The next step took ``seconds``."""
        self._step_times_s.append(seconds)

    def rewind(self, step: int) -> None:
        """The history after ``step`` completed steps is lost."""
        del self._step_times_s[max(0, step - self._first_step) :]
        self._first_step = min(self._first_step, step)

    def wall_s(self, now_s: float) -> float:
        """Seconds since the driver took up the run."""
        return now_s - self._begun_s

    def goodput(self, now_s: float) -> float:
        """Between 0 and 1; 0 before the first step."""
        wall_s = self.wall_s(now_s)
        return min(1.0, sum(self._step_times_s) / wall_s) if wall_s > 0 else 0.0
