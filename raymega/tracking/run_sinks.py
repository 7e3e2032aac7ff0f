"""Sinks of a run: metrics.jsonl, Ray's metrics, the job's trackers, pictures and incident pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from raymega.config.schema import Job, PluginsSection
from raymega.plugins import Plugin
from raymega.tracking.history import METRICS_FILE
from raymega.tracking.incidents import IncidentsSink
from raymega.tracking.jsonl import open_jsonl
from raymega.tracking.plots_sink import PlotsSink
from raymega.tracking.queued_sink import QueuedSink, Recorder
from raymega.tracking.ray_metrics import RayMetricsSink
from raymega.tracking.sink import SINK_CLOSE_S, CompositeSink, Sink
from raymega.tracking.trackers.makers import TrackerSetup
from raymega.tracking.trackers.named import NamedRecorder
from raymega.tracking.trackers.selection import chosen_trackers

TRACKER_PATIENCE_S = 20.0
"""Longest seconds for which records of a starting run wait for its first step."""


@contextmanager
def run_sinks(
    job: Job,
    folder: Path,
    *,
    more: Sequence[Sink],
    references: Mapping[str, float],
    files: Mapping[Path, str],
    first: Callable[[Sink], Sink] | None = None,
) -> Iterator[Sink]:
    """Yield one sink that forwards to all sinks of the run; close them afterwards.

    Args:
        job: Job of the run.
        folder: Driver's folder of the run.
        more: Sinks beside the run's own.
        references: Horizontal lines of the loss curve, by label.
        files: Titles of files that are kept with the run, by path.
        first: Function that makes a sink with events of its own, for the sink that it gets; None for none.
    """
    metrics = folder / METRICS_FILE
    watchers: list[Sink] = [open_jsonl(metrics), RayMetricsSink(clock=_unix_s), *more]
    setup = TrackerSetup(section=job.tracking, folder=folder)
    watchers += [_tracker_sink(row, setup, job.plugins) for row in chosen_trackers(job)]
    # Pictures and incident pages emit events of their own, which the other sinks receive.
    others = CompositeSink(watchers)
    pictures = PlotsSink(
        folder, metrics=metrics, references=references, watcher=others, files=files
    )
    incidents = IncidentsSink(folder / "incidents", clock=_unix_s, watcher=others)
    # Results that come with the last event are in the pictures, too.
    makers = [first(others)] if first is not None else []
    sink = CompositeSink([incidents, *makers, pictures, others])
    try:
        yield sink
    finally:
        sink.close(SINK_CLOSE_S)


def _tracker_sink(row: Plugin, setup: TrackerSetup, plugins: PluginsSection) -> QueuedSink:
    """Return the queue of a tracker, whose thread imports its code."""

    def open_recorder() -> Recorder:
        code = plugins.code("tracker", row.name)
        return NamedRecorder(row, lambda: code(setup)) if row.is_outside else code(setup)

    return QueuedSink(
        open_recorder,
        title=f"tracker {row.name}",
        clock=_unix_s,
        every=setup.section.tracker_every,
        start_patience_s=TRACKER_PATIENCE_S,
    )


def _unix_s() -> float:
    return datetime.now(UTC).timestamp()
