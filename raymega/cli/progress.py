"""Progress bars on stderr, on a terminal only: phases of a preparation, steps of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from raymega.events import AttemptStarted, RunEvent, RunStarted, StepFinished, WorkersStarted

OnProgress = Callable[[str, int, int], None]


@contextmanager
def phase_bars() -> Iterator[OnProgress]:
    """A bar a phase, gone at the end; nothing at all when no phase begins.

    The body calls what it is given with (phase, done, total).
    """
    progress = _make_progress()
    bars: dict[str, int] = {}

    def show(phase: str, done: int, total: int) -> None:
        if phase not in bars:
            progress.start()
            bars[phase] = int(progress.add_task(phase, total=total))
        progress.update(bars[phase], completed=done)  # type: ignore[arg-type]  # TaskID is an int

    try:
        yield show
    finally:
        progress.stop()


@contextmanager
def step_bar() -> Iterator[StepBar]:
    """A StepBar for the body. What prints to stdout must be made inside, so that it goes above."""
    with _make_progress() as progress:
        yield StepBar(progress)


class StepBar:
    """A sink: one bar over the steps of a run, with what the driver waits for before the first."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting Ray", total=None)

    def emit(self, event: RunEvent) -> None:
        """Move the bar; never blocks."""
        match event:
            case RunStarted():
                self._progress.update(
                    self._task,
                    description="starting",
                    total=event.total_steps,
                    completed=event.step,
                )
            case AttemptStarted():
                self._progress.update(self._task, description="starting workers")
            case WorkersStarted():
                self._progress.update(self._task, description="building")
            case StepFinished():
                self._progress.update(self._task, description="training", completed=event.step)

    def close(self, timeout_s: float) -> None:
        """Nothing is open: :func:`step_bar` takes the bar away."""


def _make_progress() -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        # On a terminal lines go above the bar; output that goes to a file must stay there.
        redirect_stdout=sys.stdout.isatty(),
    )
