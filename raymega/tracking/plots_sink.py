"""PlotsSink draws the run's figures once, at its end: loss, tasks, expert load, pipeline timeline, trace.

Drawing itself is in `tracking/loss_plot.py`, `tracking/tasks_plot.py`, `tracking/expert_heatmap.py` and `schedule/timeline_svg.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from raymega.events import ArtefactWritten, RunEvent, RunFinished, RunStarted, Timeline
from raymega.schedule.timeline_svg import draw_svg
from raymega.schedule.trace import merge_trace
from raymega.tracking.expert_heatmap import draw_heat, load_expert_loads
from raymega.tracking.loss_plot import draw_curve, load_curve
from raymega.tracking.sink import Sink
from raymega.tracking.tasks_plot import draw_task_curves, load_task_curves


class PlotsSink:
    """Sink that keeps the newest recorded timeline, and draws when the run is finished.

    It must come before the sinks behind ``watcher``, which get RunFinished after its files.
    """

    def __init__(
        self,
        folder: Path,
        *,
        metrics: Path,
        references: Mapping[str, float],
        watcher: Sink,
        files: Mapping[Path, str] | None = None,
    ) -> None:
        """Draw into ``folder``.

        Args:
            folder: Output folder.
            metrics: Path of the run's metrics.jsonl, from which the curves are read.
            references: Levels of horizontal lines in the loss curve by label, in nats.
            watcher: Sink that gets an ArtefactWritten for each file.
            files: Titles of existing files by path, announced to ``watcher`` as well.
        """
        self._folder, self._metrics = folder, metrics
        self._references, self._watcher = references, watcher
        self._files = files or {}
        self._name = ""
        self._timeline: Timeline | None = None

    def emit(self, event: RunEvent) -> None:
        """Record what the figures need; draw them at RunFinished, which takes about 2 s."""
        match event:
            case RunStarted():
                self._name = event.name
            case Timeline():
                self._timeline = event
            case RunFinished():
                self._draw()

    def close(self, timeout_s: float) -> None:
        """Return at once: no file is open."""

    def _draw(self) -> None:
        # existing files, such as the planner's choice of layout
        for path, title in self._files.items():
            self._tell(path, title)
        # pipeline timeline and trace of the newest recorded step
        if self._timeline is not None:
            self._draw_timeline(self._timeline)
        # loss curve, evaluation tasks and expert load, from metrics.jsonl
        curve = load_curve(self._metrics) if self._metrics.exists() else None
        if curve is not None and curve.train:
            path = self._folder / "loss.png"
            draw_curve(curve, path, title=f"run {self._name}", references=self._references)
            self._tell(path, "Loss curve")
        tasks = load_task_curves(self._metrics) if self._metrics.exists() else {}
        if tasks:
            path = self._folder / "tasks.png"
            draw_task_curves(tasks, path, title=f"run {self._name}, evaluation tasks")
            self._tell(path, "Evaluation tasks")
        loads = load_expert_loads(self._metrics) if self._metrics.exists() else {}
        if loads:
            path = self._folder / "experts.svg"
            draw_heat(loads, path, title=f"run {self._name}, expert load")
            self._tell(path, "Expert load")

    def _draw_timeline(self, event: Timeline) -> None:
        rows = {f"rank {rank}": events for rank, events in sorted(event.events.items())}
        title = (
            f"run {self._name}, step {event.step}, as recorded; simulated bubble of the schedule: "
            f"{event.metrics['run/simulated_bubble']:.3f}"
        )
        path = self._folder / "timeline.svg"
        picture = draw_svg(rows, title=title, time_unit="ms", scale=1000.0)
        path.write_text(picture, encoding="utf-8")
        self._tell(path, "Pipeline timeline")
        trace = self._folder / "trace.json"
        trace.write_text(json.dumps(merge_trace(event.events, event.transfers)), encoding="utf-8")
        self._tell(trace, "Trace for Perfetto")

    def _tell(self, path: Path, title: str) -> None:
        self._watcher.emit(ArtefactWritten(path=str(path), title=title))
