"""Writes an evaluation's result to the MLflow run of its checkpoint, found by the run's record and tracking settings."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from raymega.checkpoint.tools.handle import Checkpoint
from raymega.config.schema import TrackingSection
from raymega.errors import ConfigError, Fault, one_line
from raymega.evaluate.report import EvalReport
from raymega.events import TasksEvaluated
from raymega.orchestrate.run_store.journal import read_record
from raymega.storage.registry import driver_folder
from raymega.tracking.mlflow import HTTP_MAX_RETRIES, HTTP_TIMEOUT_S, tracking_uri
from raymega.tracking.names import task_metrics

OF_RUN, OFF = "run", "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowRun:
    """MLflow run of a checkpoint.

    Attributes:
        uri: Tracking URI.
        experiment: Name of the experiment.
        run_id: Raymega's id of the run.
        name: Name of the run.
    """

    uri: str
    experiment: str
    run_id: str
    name: str


def find_mlflow_run(checkpoint: Checkpoint, setting: str) -> MlflowRun | None:
    """Return where an evaluation of ``checkpoint`` is recorded; None where it is not.

    Args:
        checkpoint: Checkpoint of a run, or of a converted model, which has no run.
        setting: ``run`` for the run's own ``tracking.mlflow_uri``, ``off``, or another tracking URI.

    Raises:
        ConfigError: A tracking URI is given for a checkpoint that belongs to no run.
    """
    if setting == OFF:
        return None
    store, manifest = checkpoint
    record = read_record(store)
    if record is None:
        if setting == OF_RUN:
            return None
        raise ConfigError(
            Fault(
                fact=f"--mlflow {setting}, and {store.uri} has no run.json",
                rule="metrics are written to the MLflow run of the checkpoint's run; a converted model has none",
                remedy="leave --mlflow out; --json prints the same metrics",
            )
        )
    section: Any = manifest.job.get("tracking", {})
    tracking = TrackingSection.model_validate(section, strict=False)
    uri = tracking.mlflow_uri if setting == OF_RUN else setting
    folder = driver_folder(store.uri)
    # A run whose driver was on another machine has its sqlite file there.
    is_elsewhere = uri == OF_RUN and not (folder / "mlflow.db").exists()
    if uri == OFF or is_elsewhere:
        return None
    return MlflowRun(
        uri=tracking_uri(uri, folder),
        experiment=tracking.experiment,
        run_id=record.run_id,
        name=record.name,
    )


def recorded(report: EvalReport, run: MlflowRun | None) -> EvalReport:
    """Write the report to MLflow, and return it with the place in its notes, or the reason why not.

    A result that took an hour is never lost to a server that does not answer.
    """
    if run is None:
        return report
    try:
        _write(report, run)
    except Exception as error:  # noqa: BLE001 - the edge to MLflow: the result is printed all the same
        note = f"not recorded in MLflow at {run.uri}: {one_line(str(error), 200)}"
    else:
        note = f"recorded in MLflow at {run.uri}, run {run.name}, step {report.step}"
    return replace(report, notes=(*report.notes, note))


def _write(report: EvalReport, run: MlflowRun) -> None:
    from raymega.tracking import mlflow_recorder  # the import of mlflow takes seconds

    mlflow_recorder.limit_client(timeout_s=HTTP_TIMEOUT_S, max_retries=HTTP_MAX_RETRIES)
    recorder = mlflow_recorder.Recorder(uri=run.uri, experiment=run.experiment)
    name = f"evaluations/{report.task}-step-{report.step:08d}"
    samples = "".join(f"{json.dumps(each)}\n" for each in report.samples)
    recorder.add_evaluation(
        TasksEvaluated(step=report.step, metrics=task_metrics(report.task, report.metrics)),
        run_id=run.run_id,
        name=run.name,
        files={
            f"{name}.json": json.dumps(report.summary(), indent=2),
            f"{name}.samples.jsonl": samples,
        },
        time_s=datetime.now(UTC).timestamp(),
    )
