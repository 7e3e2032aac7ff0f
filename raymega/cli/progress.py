"""Progress bars on stderr, for terminals only: phases of a preparation, steps of a run."""

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
    """Yield a function ``(phase, done, total)`` that shows one bar per phase, removed at the end.

    Nothing is shown until the first call.
    """
    progress = _make_progress()
    bars: dict[str, int] = {}

    def show(phase: str, done: int, total: int) -> None:
        if phase not in bars:
            # The first call starts the display.
            progress.start()
            bars[phase] = int(progress.add_task(phase, total=total))
        progress.update(bars[phase], completed=done)  # type: ignore[arg-type]  # TaskID is an int

    try:
        yield show
    finally:
        progress.stop()


@contextmanager
def step_bar() -> Iterator[StepBar]:
    """Yield a StepBar; create consoles on stdout inside the body, so that lines appear above the bar."""
    with _make_progress() as progress:
        yield StepBar(progress)


class StepBar:
    """Sink that shows a bar over the steps of a run, and before the first step what the driver waits for."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting Ray", total=None)

    def emit(self, event: RunEvent) -> None:
        """Update the bar; never block."""
        match event:
            case RunStarted():
                self._progress.update(
                    self._task,
                    description="starting",
                    total=event.total_steps,
                    completed=event.step,
                )
            # Before the first step the bar names the phase of the start.
            case AttemptStarted():
                self._progress.update(self._task, description="starting workers")
            case WorkersStarted():
                self._progress.update(self._task, description="building the model")
            case StepFinished():
                self._progress.update(self._task, description="training", completed=event.step)

    def close(self, timeout_s: float) -> None:
        """Return at once: :func:`step_bar` removes the bar."""


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
