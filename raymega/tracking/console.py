"""ConsoleSink prints a run to a stream: a line every few steps, and one sentence for each other event.

Wording and layout are defined here; `tracking/names.py` defines what each metric means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console

from raymega.errors import counted, duration
from raymega.events import (
    ArtefactWritten,
    AttemptFailed,
    AttemptStarted,
    BadStep,
    CheckpointCommitted,
    EvaluationFinished,
    ExpertLoads,
    Memory,
    NodesChecked,
    Recovered,
    RoutingCollapsed,
    RunEvent,
    RunFinished,
    RunStarted,
    SamplesDrawn,
    SaveFailed,
    SaveProgress,
    SaveSkipped,
    SparesChanged,
    StepFinished,
    StragglerDetected,
    TasksEvaluated,
    Timeline,
    WorkersStarted,
)
from raymega.tracking.expert_load import collapse_warning
from raymega.tracking.names import TASK_METRIC
from raymega.tracking.time_left import TimeLeft

GIB_BYTES = 1024**3
MIB_BYTES = 1024**2
# Metric name, format of the cell, factor from the metric's unit to the shown one.
STEP_COLUMNS = (
    ("train/loss", "loss {:8.4f}", 1.0),
    ("train/grad_norm", "grad norm {:8.3f}", 1.0),
    ("train/lr", "lr {:9.3e}", 1.0),
    ("train/tokens_per_s", "{:>10,.0f} tokens/s", 1.0),
    ("train/step_time_s", "{:8,.1f} ms", 1000.0),
)
EVALUATION_COLUMNS = (
    ("eval/loss", "loss {:.4f}", 1.0),
    ("eval/perplexity", "perplexity {:.2f}", 1.0),
    ("eval/accuracy", "accuracy {:.4f}", 1.0),
    ("eval/ema_loss", "loss of the average {:.4f}", 1.0),
)
Trouble = SaveFailed | AttemptFailed | BadStep | StragglerDetected | RoutingCollapsed


class ConsoleSink:
    """Sink that prints events to a stream, in colour only on a terminal."""

    def __init__(self, stream: TextIO, *, every: int) -> None:
        """Print every ``every``-th step, the first step of each attempt, and the last step of the run."""
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._every = every
        self._name = ""
        self._total_steps = 0
        self._is_first_step = True
        self._has_begun = False
        self._time_left = TimeLeft()

    def emit(self, event: RunEvent) -> None:
        """Print the event's line, if it has one; block only while the stream does."""
        match event:
            # steps: most are left out, see ``every``
            case StepFinished():
                self._print_step(event)
            # the run and its attempts
            case RunStarted():
                self._name, self._total_steps = event.name, event.total_steps
                self._time_left.observe(event)
                self._print(_run_started(event), style="bold")
            case AttemptStarted():
                self._is_first_step = self._has_begun = True
                self._time_left.observe(event)
                self._print(_attempt_started(event))
            case RunFinished():
                style = "bold green" if event.status == "finished" else "bold red"
                text = _run_finished if self._has_begun else _run_without_attempt
                self._print(text(event, self._name), style=style)
            case Memory() | ExpertLoads():
                pass  # numbers for curves and the heat map
            case Recovered():
                self._print(_recovered(event), style="green")
            # all other events: red for trouble, plain for news
            case _ if isinstance(event, Trouble):
                self._print(_trouble(event), style="red")
            case _:
                self._print(_news(event))

    def close(self, timeout_s: float) -> None:
        """Return at once: nothing is buffered."""

    def _print_step(self, event: StepFinished) -> None:
        self._time_left.observe(event)
        # The first step of an attempt shows at once that training is under way.
        is_due = event.step % self._every == 0 or event.step == self._total_steps
        if is_due or self._is_first_step:
            self._print(_step_line(event, self._total_steps, self._time_left.seconds))
        self._is_first_step = False

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(line, style=style, soft_wrap=True)


def _cells(metrics: Mapping[str, float], columns: Sequence[tuple[str, str, float]]) -> list[str]:
    """Return the metrics formatted by their columns, without those that are absent."""
    return [
        form.format(metrics[name] * factor) for name, form, factor in columns if name in metrics
    ]


def _evaluation(metrics: Mapping[str, float]) -> str:
    """Return loss and perplexity or accuracy, of each named set where there are any."""
    start = "eval/set_loss/"
    names = [name.removeprefix(start) for name in metrics if name.startswith(start)]
    if not names:
        return ", ".join(_cells(metrics, EVALUATION_COLUMNS))
    columns = {
        name: [(f"{of.replace('/', '/set_')}/{name}", form, factor) for of, form, factor in EVALUATION_COLUMNS]
        for name in names
    }  # fmt: skip
    return "; ".join(f"{name} {', '.join(_cells(metrics, columns[name]))}" for name in names)


def _tasks(metrics: Mapping[str, float]) -> str:
    """Return the metrics of each evaluation task."""
    by_task: dict[str, list[str]] = {}
    for name, value in metrics.items():
        task, _, metric = name.removeprefix(f"{TASK_METRIC}/").partition("/")
        by_task.setdefault(task, []).append(f"{metric} {value:.4g}")
    return "; ".join(f"{task} {', '.join(cells)}" for task, cells in by_task.items())


def _step_line(event: StepFinished, total_steps: int, left_s: float) -> str:
    """Return the line of a step, in cells of fixed width so that columns align across lines."""
    width = len(str(total_steps))
    place = f"step {event.step:>{width}}/{total_steps}"
    cells = [place, *_cells(event.metrics, STEP_COLUMNS)]
    return "   ".join([*cells, f"left {duration(left_s)}"] if left_s else cells)


def _run_started(event: RunStarted) -> str:
    if event.is_resumed and event.step >= event.total_steps:
        return f"Run {event.name} has all its {event.total_steps} steps. {event.uri}"
    if event.is_resumed:
        return (
            f"Run {event.name} resumes from step {event.step} of {event.total_steps}. {event.uri}"
        )
    return f"Run {event.name} starts; {counted(event.total_steps, 'step')}. {event.uri}"


def _attempt_started(event: AttemptStarted) -> str:
    return (
        f"Attempt {event.attempt} starts at step {event.step}{_from(event)} on "
        f"{_grid(event.grid)}: {event.reason}."
    )


def _from(event: AttemptStarted | Recovered) -> str:
    """Return where the state comes from, unless it is a checkpoint, which is the usual case."""
    return {"memory": " (in-memory snapshot)", "replicas": " (held by replicas)"}.get(
        event.source, ""
    )


def _grid(grid: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={degree}" for axis, degree in grid.items() if degree > 1) or "one rank"


def _run_finished(event: RunFinished, name: str) -> str:
    ending = {
        "finished": "finished",
        "failed": "FAILED",
        "preempted": "stopped (resumable)",
        "superseded": "was taken over by another driver",
        "interrupted": "was interrupted; the same command resumes it",
    }
    # The reason is empty for a finished run.
    checkpoint = event.checkpoint_uri or "none"
    return " ".join(
        part
        for part in (
            f"Run {name} {ending[event.status]} at step {event.step} after "
            f"{duration(event.wall_s)};",
            f"goodput {event.goodput:.1%}; newest checkpoint: {checkpoint}.",
            event.reason,
        )
        if part
    )


def _run_without_attempt(event: RunFinished, name: str) -> str:
    """Return the end of a run in which this driver began no attempt."""
    if event.status != "finished":
        why = f" ({event.reason})" if event.reason else ""
        return f"Run {name} did not begin an attempt{why}; step {event.step} is saved."
    return (
        f"Run {name} is finished: {event.reason}; newest checkpoint: {event.checkpoint_uri}. "
        f"To train further: --set run.steps={2 * event.step}"
    )


def _trouble(event: Trouble) -> str:
    match event:
        case RoutingCollapsed():
            return collapse_warning(event.layer, event.experts, event.step)
        case SaveFailed():
            return f"Checkpoint of step {event.step} failed: {event.reason}"
        case StragglerDetected():
            return (
                f"Straggler: rank {event.rank} on node {event.node} works {event.work_s * 1000:.0f} ms per step, "
                f"{event.ratio:.1f} times the median of the other ranks of its stage."
            )
        case BadStep():
            where = f"; {event.where}" if event.where else ""
            return f"Bad step {event.step}: {event.fact}; recomputed, {event.action}{where}"
        case AttemptFailed():
            return f"Attempt {event.attempt} failed after step {event.step}: {event.cause}"


def _recovered(event: Recovered) -> str:
    return (
        f"Recovered: detected in {event.detection_s:.1f} s, back {event.recovery_s:.1f} s later; "
        f"resumed from step {event.restored_step}{_from(event)}, "
        f"{counted(event.lost_steps, 'lost step')} recomputed{_phases(event)}."
    )


def _phases(event: Recovered) -> str:
    shown = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in event.phases.items())
    return f" ({shown} s)" if shown else ""


def _news(event: RunEvent) -> str:
    match event:
        # start of an attempt
        case SparesChanged(ready=0):
            return (
                f"No spare is loaded after step {event.step}, of {event.wanted}: a worker lost now is replaced "
                "by a new process."
            )
        case SparesChanged():
            return f"{event.ready} of {event.wanted} spares are loaded after step {event.step}."
        case WorkersStarted():
            nodes = counted(len(set(event.nodes.values())), "node")
            return f"{counted(len(event.pids), 'worker')} started on {nodes}."
        case NodesChecked():
            return f"Nodes checked in {event.seconds:.1f} s: {event.detail}."
        # results
        case EvaluationFinished():
            return f"Validation at step {event.step}: {_evaluation(event.metrics)}."
        case SamplesDrawn():
            pairs = zip(event.prompts, event.texts, strict=True)
            samples = "; ".join(f"{prompt!r} -> {text!r}" for prompt, text in pairs)
            return f"Samples at step {event.step}: {samples}."
        case TasksEvaluated():
            return f"Tasks at step {event.step}: {_tasks(event.metrics)}."
        case _:
            return _saves_and_files(event)


def _saves_and_files(event: RunEvent) -> str:
    match event:
        case CheckpointCommitted():
            return (
                f"Checkpoint of step {event.step}: {_size(event.num_bytes)}, training stalled "
                f"{event.stall_s * 1000:.0f} ms, written in {event.save_s:.1f} s."
            )
        case SaveProgress():
            share = event.written_bytes / max(1, event.num_bytes)
            return f"Saving step {event.step}: {share:.0%} of {_size(event.num_bytes)} written."
        case SaveSkipped():
            return (
                f"Checkpoint of step {event.step} skipped: the previous one is still being written."
            )
        # files and figures
        case Timeline():
            return (
                f"Timeline of step {event.step}: measured bubble {event.metrics['run/bubble']:.1%} of busy "
                f"time, simulated {event.metrics['run/simulated_bubble']:.1%}."
            )
        case ArtefactWritten():
            return f"{event.title}: {event.path}"
        case _:
            return repr(event)


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB_BYTES:
        return f"{num_bytes / GIB_BYTES:.2f} GiB"
    return f"{num_bytes / MIB_BYTES:.1f} MiB"
