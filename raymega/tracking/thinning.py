"""Steps of a long run that a curve needs: all at first, then fewer, which keeps a record small."""

from __future__ import annotations

from dataclasses import replace

from raymega.events import (
    AttemptFailed,
    ExpertLoads,
    Memory,
    RunEvent,
    RunFinished,
    StepFinished,
    Timeline,
)

ALL_STEPS = 1000
"""Number of first steps that are all recorded."""


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
