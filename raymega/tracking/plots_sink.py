"""PlotsSink draws the run's figures once, at its end: loss, tasks, expert load, pipeline timeline, trace.

Drawing itself is in `tracking/run_charts.py` and `schedule/timeline_svg.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from raymega.drawing.chart import draw_chart
from raymega.events import (
    ArtefactWritten,
    AttemptStarted,
    RunEvent,
    RunFinished,
    RunStarted,
    Timeline,
)
from raymega.plan.grid import Grid
from raymega.schedule.timeline_svg import draw_svg
from raymega.schedule.trace import merge_trace
from raymega.tracking.history import load_history
from raymega.tracking.run_charts import (
    ACCURACY,
    PERPLEXITY,
    expert_map,
    loss_chart,
    task_charts,
)
from raymega.tracking.sink import Sink

TIMELINE_FILE, TRACE_FILE = "timeline.svg", "trace.json"
DEFAULT_ORDER = Grid().order
LOSS_FILE, EXPERTS_FILE = "loss.svg", "experts.svg"
TASK_FILES = {ACCURACY: "task_accuracy.svg", PERPLEXITY: "task_perplexity.svg"}
"""Files of the charts of evaluation tasks, by their titles."""


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
        self._name, self._order = "", DEFAULT_ORDER
        self._grid: Mapping[str, int] = {}
        self._timeline: Timeline | None = None

    def emit(self, event: RunEvent) -> None:
        """Record what the figures need; draw them at RunFinished, which takes a moment."""
        match event:
            case RunStarted():
                self._name, self._order = event.name, _order_of(event.job)
            case AttemptStarted():
                self._grid = event.grid
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
        # loss curve and expert load, from metrics.jsonl
        if not self._metrics.exists():
            return
        history = load_history(self._metrics)
        if "loss" in history.steps:
            title = f"run {self._name}: loss, nats per token"
            picture = loss_chart(history, title=title, levels=self._references, alone=True)
            self._write(LOSS_FILE, picture, "Loss curve")
        for kind, chart in task_charts(history):
            self._write(TASK_FILES[kind], draw_chart(chart, alone=True), kind)
        if picture := expert_map(history, title=f"run {self._name}: load of experts", alone=True):
            self._write(EXPERTS_FILE, picture, "Expert load")

    def _draw_timeline(self, event: Timeline) -> None:
        simulated = event.metrics["run/simulated_bubble"]
        grid = Grid(**self._grid, order=self._order)
        ranks = grid.by_pipeline(event.events)
        picture = draw_svg(
            {f"{rank}: {grid.describe_rank(rank)}": event.events[rank] for rank in ranks},
            title=f"run {self._name}, step {event.step}, as recorded",
            note=f"simulated bubble of the schedule: {simulated:.3f}, as if transfers took no time",
            time_unit="ms",
            scale=1000.0,
        )
        self._write(TIMELINE_FILE, picture, "Pipeline timeline")
        trace = json.dumps(merge_trace(event.events, event.transfers))
        self._write(TRACE_FILE, trace, "Trace for Perfetto")

    def _write(self, name: str, content: str, title: str) -> None:
        path = self._folder / name
        path.write_text(content, encoding="utf-8")
        self._tell(path, title)

    def _tell(self, path: Path, title: str) -> None:
        self._watcher.emit(ArtefactWritten(path=str(path), title=title))


def _order_of(job: Mapping[str, object]) -> str:
    parallel = job.get("parallel")
    order = parallel.get("order") if isinstance(parallel, Mapping) else None
    return order if isinstance(order, str) else DEFAULT_ORDER
