"""SeriesRecorder writes a run's metrics as rows by step, each step once over all drivers of the run.

A RowStore writes and reads the rows of one format. What an earlier driver has written is read back, so that
a resumed run neither repeats a step nor leaves one out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from raymega.events import AttemptStarted, RunFinished, RunStarted
from raymega.tracking.history import Series, load_history
from raymega.tracking.names import METRICS, Metric, metrics_of
from raymega.tracking.queued_sink import is_local_refusal
from raymega.tracking.sink import Stamped


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Metrics by full name after ``step`` completed steps, with their time in seconds since the epoch."""

    step: int
    time_s: float
    metrics: Mapping[str, float]


class RowStore(Protocol):
    """Rows of one run in one format; the methods may block."""

    def last_steps(self) -> Mapping[str, int]:
        """Return the last step of each metric that earlier drivers have written; called once, first."""

    def open(self, event: RunStarted) -> None:
        """Open the run for writing; called once, second."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, whose steps rise within each metric, and hand them to the operating system."""

    def close(self, *, has_failed: bool) -> None:
        """Close the run's files; called once, and nothing follows."""


class SeriesRecorder:
    """Recorder whose rows rise by step in each metric: the first value of a step that is done again counts."""

    def __init__(self, store: RowStore, *, metrics_file: Path) -> None:
        """Write into ``store``.

        Args:
            store: Rows of the run.
            metrics_file: The run's metrics.jsonl, which has the steps that a killed driver lost on their way.
        """
        self._store, self._metrics_file = store, metrics_file
        self._last_steps: dict[str, int] = {}
        self._is_open, self._has_failed, self._is_first = False, False, True

    def record(self, batch: Sequence[Stamped]) -> None:
        """Write the metrics of one event, or of several steps."""
        event = batch[0].event
        if isinstance(event, RunStarted):
            self._last_steps = dict(self._store.last_steps())
            self._store.open(event)
            self._is_open = True
        if not self._is_open:
            return
        if isinstance(event, AttemptStarted) and self._is_first:
            self._fill_in(event.step, batch[0].time_s)
            self._is_first = False
        if isinstance(event, RunFinished):
            self._has_failed = event.status == "failed"
        self._write([
            Row(step=getattr(item.event, "step", 0), time_s=item.time_s, metrics=metrics_of(item.event))
            for item in batch
        ])  # fmt: skip

    def close(self) -> None:
        """Close the store's files."""
        if self._is_open:
            self._store.close(has_failed=self._has_failed)

    def is_refusal(self, error: Exception) -> bool:
        """Return whether an error would come again: all but those of connections."""
        return is_local_refusal(error)

    def _write(self, rows: Sequence[Row]) -> None:
        last_steps, fresh = dict(self._last_steps), []
        for row in rows:
            metrics = {n: v for n, v in row.metrics.items() if row.step > last_steps.get(n, -1)}
            last_steps |= dict.fromkeys(metrics, row.step)
            if metrics:
                fresh.append(Row(step=row.step, time_s=row.time_s, metrics=metrics))
        if fresh:
            self._store.write(fresh)
        # Changed only after the rows are written: a failed batch is written again.
        self._last_steps = last_steps

    def _fill_in(self, step: int, time_s: float) -> None:
        """Write the steps up to ``step`` that this run has done, and no earlier driver has brought here."""
        if step == 0 or not self._metrics_file.exists():
            return
        by_step: dict[int, dict[str, float]] = {}
        for name, series in _known_series(self._metrics_file):
            for at, value in zip(series.steps, series.values, strict=True):
                if self._last_steps.get(name, -1) < at <= step:
                    by_step.setdefault(at, {})[name] = value
        self._write([Row(step=at, time_s=time_s, metrics=by_step[at]) for at in sorted(by_step)])


def _known_series(path: Path) -> Iterator[tuple[str, Series]]:
    """Yield the surviving curves of metrics.jsonl under their full names."""
    history = load_history(path)
    for curves, is_evaluation in ((history.steps, False), (history.evaluations, True)):
        own = [m for m in METRICS if m.name.startswith("eval/") == is_evaluation]
        # Of the families that share a short name, the run's has other curves too.
        counts = Counter(_family(metric) for metric in own if metric.short_name in curves)
        ranked = sorted(own, key=lambda metric: counts[_family(metric)])
        names = {metric.short_name: metric.name for metric in ranked}
        for short, series in curves.items():
            base, slash, part = short.partition("/")
            if base in names:
                yield names[base] + slash + part, series


def _family(metric: Metric) -> str:
    return metric.name.partition("/")[0]
