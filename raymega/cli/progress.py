"""Progress of commands: bars on stderr, for terminals only, of a preparation or a run, and a run's bill as it starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from raymega.cli.plan.bill import bill_of, device_of, priced
from raymega.errors import duration
from raymega.events import AttemptStarted, RunEvent, RunStarted, StepFinished, WorkersStarted
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.bill import bill_lines, dollars
from raymega.planner.cost.simulated_step import played_step
from raymega.tracking.time_left import TimeLeft

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
def step_bar(*, dollars_per_s: float = 0.0) -> Iterator[StepBar]:
    """Yield a StepBar; create consoles on stdout inside the body, so that lines appear above the bar."""
    with _make_progress(TextColumn("{task.fields[left]}")) as progress:
        yield StepBar(progress, dollars_per_s=dollars_per_s)


class StepBar:
    """Sink that shows a bar over the steps of a run with the time left, and first what the driver waits for."""

    def __init__(self, progress: Progress, *, dollars_per_s: float = 0.0) -> None:
        """Add the bar to ``progress``; a run that costs ``dollars_per_s`` has the dollars left too."""
        self._progress, self._dollars_per_s = progress, dollars_per_s
        self._task = progress.add_task("starting Ray", total=None, left="")
        self._time_left = TimeLeft()

    def emit(self, event: RunEvent) -> None:
        """Update the bar; never block."""
        self._time_left.observe(event)
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
                self._progress.update(
                    self._task, description="training", completed=event.step, left=self._left()
                )

    def _left(self) -> str:
        left_s = self._time_left.seconds
        if not left_s:
            return ""
        cost = self._dollars_per_s * left_s
        return f"{duration(left_s)} left" + (f", ${dollars(cost)}" if cost else "")

    def close(self, timeout_s: float) -> None:
        """Return at once: :func:`step_bar` removes the bar."""


def _make_progress(*more: TextColumn) -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *more,
    )
    return Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        # On a terminal lines go above the bar; output that goes to a file must stay there.
        redirect_stdout=sys.stdout.isatty(),
    )


class BillSink:
    """Sink that prints, once the run has started, what its remaining steps are expected to cost."""

    def __init__(self, console: Console, plan: RunPlan, *, price: float) -> None:
        """Print to ``console``; a ``price`` of 0 is that of the job's accelerator."""
        self._console, self._plan = console, plan
        device = device_of(plan.job)
        self._device = device and priced(device, price)

    def emit(self, event: RunEvent) -> None:
        """Print the bill at the start of a run that has steps to do."""
        if not isinstance(event, RunStarted) or event.step >= event.total_steps:
            return
        if self._device is None:
            self._print("Expected time and cost: name the GPU, as --set cluster.accelerator=h100")
            return
        step_s = played_step(self._plan, self._device).total_s
        bill = bill_of(self._plan, self._device, step_s, first_step=event.step)
        for line in bill_lines(bill, self._device):
            self._print(
                f"Expected on {self._plan.grid.world_size} x {_named(self._device)}: {line}"
            )

    def close(self, timeout_s: float) -> None:
        """Return at once: nothing is buffered."""

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def _named(device: Accelerator) -> str:
    """Return the device's name; of the catalogue's cpu, that it is not this machine's."""
    return "cpu of the catalogue" if device.name == "cpu" else device.name
