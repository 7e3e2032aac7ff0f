"""Sinks of a run: metrics.jsonl, MLflow, Ray's metrics, pictures and incident pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from raymega.config.schema import Job
from raymega.tracking.history import METRICS_FILE
from raymega.tracking.incidents import IncidentsSink
from raymega.tracking.jsonl import open_jsonl
from raymega.tracking.mlflow import MlflowSink, tracking_uri
from raymega.tracking.plots_sink import PlotsSink
from raymega.tracking.ray_metrics import RayMetricsSink
from raymega.tracking.sink import SINK_CLOSE_S, CompositeSink, Sink

MLFLOW_PATIENCE_S = 20.0
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
    if job.tracking.mlflow_uri != "off":
        uri = tracking_uri(job.tracking.mlflow_uri, folder)
        watchers.append(
            MlflowSink(
                uri=uri,
                experiment=job.tracking.experiment,
                clock=_unix_s,
                start_patience_s=MLFLOW_PATIENCE_S,
            )
        )
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


def _unix_s() -> float:
    return datetime.now(UTC).timestamp()
