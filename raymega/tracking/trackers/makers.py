"""Functions that open the recorder of each tracker; the names of `raymega/plugins.py` lead here.

A sink's thread calls them: packages are imported there, not at the run's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from os.path import expandvars
from pathlib import Path

from raymega.config.schema import TrackingSection
from raymega.tracking.history import METRICS_FILE
from raymega.tracking.mlflow import open_recorder, tracking_uri
from raymega.tracking.queued_sink import Recorder
from raymega.tracking.trackers.series import RowStore, SeriesRecorder


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerSetup:
    """Arguments of a tracker's code: the job's section, and the driver's folder of the run."""

    section: TrackingSection
    folder: Path


def open_jsonl(setup: TrackerSetup) -> Recorder:
    """Return the recorder of curves.jsonl."""
    from raymega.tracking.trackers.jsonl_rows import JsonlRows

    return _series(setup, JsonlRows(setup.folder))


def open_tensorboard(setup: TrackerSetup) -> Recorder:
    """Return the recorder of TensorBoard's event files."""
    from raymega.tracking.trackers.tensorboard_rows import TensorboardRows

    return _series(setup, TensorboardRows(setup.folder))


def open_wandb(setup: TrackerSetup) -> Recorder:
    """Return the recorder of Weights & Biases."""
    from raymega.tracking.trackers.wandb_rows import WandbRows

    section = setup.section
    rows = WandbRows(setup.folder, project=section.experiment, mode=section.wandb_mode)
    return _series(setup, rows)


def open_mlflow(setup: TrackerSetup) -> Recorder:
    """Return the recorder of MLflow."""
    uri = tracking_uri(setup.section.mlflow_uri, setup.folder)
    return open_recorder(uri=uri, experiment=setup.section.experiment)


def open_webhook(setup: TrackerSetup) -> Recorder:
    """Return the recorder of a webhook."""
    from raymega.tracking.trackers.webhook import WebhookRecorder

    return WebhookRecorder(expandvars(setup.section.webhook_url))


def _series(setup: TrackerSetup, rows: RowStore) -> Recorder:
    return SeriesRecorder(rows, metrics_file=setup.folder / METRICS_FILE)
