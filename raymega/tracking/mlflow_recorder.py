"""Recorder writes a run to MLflow: one parent run for its whole life, one child run per attempt.

Every call may block on the network and may be repeated after a failure: existing records are found, not
created twice. Only the thread of `tracking/mlflow.py` imports this module: importing mlflow takes seconds.
"""

# mypy: allow-untyped-calls
# Parts of mlflow's client have no types.

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from mlflow import MlflowClient
from mlflow import environment_variables as settings
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunData, RunTag
from mlflow.exceptions import MlflowException
from mlflow.telemetry import set_telemetry_client
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_RUN_NOTE,
    MLFLOW_SOURCE_NAME,
)

from raymega.events import (
    ArtefactWritten,
    AttemptFailed,
    AttemptStarted,
    BadStep,
    CheckpointCommitted,
    RoutingCollapsed,
    RunFinished,
    RunStarted,
    SamplesDrawn,
    SaveFailed,
    StragglerDetected,
    TasksEvaluated,
    WorkersStarted,
)
from raymega.tracking.mlflow_database import artefact_location, prepare_database
from raymega.tracking.mlflow_facts import (
    EXPERIMENT_TAGS,
    changed_fields,
    datasets_of,
    describe,
    environment,
    params_of,
    sign_tag,
    source_tags,
)
from raymega.tracking.mlflow_metrics import (
    HIDDEN,
    chunks,
    is_series,
    kind_of,
    last_steps_in,
    may_be_constant,
    metrics_in,
)
from raymega.tracking.names import metrics_of
from raymega.tracking.queued_sink import is_local_refusal
from raymega.tracking.sink import Stamped

KEPT_FOLDER = ".raymega/mlflow"
"""Folder of empty databases, below the user's home."""
RUN_ID_TAG = "raymega.run_id"
ATTEMPT_TAG = "raymega.attempt"
LAST_STEPS_TAG = "raymega.last_steps"
MAX_METRICS_PER_BATCH = 900
MAX_PAIRS_PER_BATCH = 100
MAX_VALUE_CHARS = 5000
STATUS = {
    "finished": "FINISHED",
    "failed": "FAILED",
    **dict.fromkeys(("preempted", "superseded", "interrupted"), "KILLED"),
}


def limit_client(*, timeout_s: int, max_retries: int) -> None:
    """Set short timeouts and disable telemetry and prints of mlflow, except where the user has set them.

    With mlflow's defaults one call to a dead server takes four minutes.
    """
    limits = (
        (settings.MLFLOW_HTTP_REQUEST_TIMEOUT, timeout_s),
        (settings.MLFLOW_HTTP_REQUEST_MAX_RETRIES, max_retries),
        (settings.MLFLOW_DISABLE_TELEMETRY, True),
    )
    for setting, value in limits:
        if not setting.is_set():
            setting.set(value)
    # mlflow prints a link when a run ends, and stdout may be the JSON lines of `train --json`.
    settings.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.set(True)
    set_telemetry_client()
    logging.getLogger("mlflow").setLevel(logging.WARNING)


class Recorder:
    """Writer of events to one MLflow server or database.

    Series are in the parent run, where steps only rise: a recomputed step is not written again. The child
    run of an attempt has the first value of each metric. A tag keeps the last step of each kind of series,
    from which a later driver continues.
    """

    def __init__(self, *, uri: str, experiment: str) -> None:
        self._client = MlflowClient(uri)
        kept = Path.home() / KEPT_FOLDER / f"{metadata.version('mlflow')}.db"
        prepare_database(uri, self._client.search_experiments, kept=kept)
        self._experiment = experiment
        self._artefacts = artefact_location(uri)
        self._experiment_id = ""
        self._name = ""
        self._parent = ""
        self._child = ""
        self._last_steps: dict[str, int] = {}
        self._floors: dict[str, int] = {}
        self._in_child: set[str] = set()
        self._first_values: dict[str, Metric] = {}

    @property
    def run_id(self) -> str:
        """Return MLflow's id of the parent run; empty before RunStarted is recorded."""
        return self._parent

    def record(self, batch: Sequence[Stamped]) -> None:
        """Write one event, or several StepFinished of one attempt in one request per run."""
        match batch[0].event:
            # parent run and child run
            case RunStarted() as event:
                self._open_run(event)
            case AttemptStarted() as event:
                self._open_attempt(event)
            case WorkersStarted() as event:
                nodes = sorted(set(event.nodes.values()))
                self._tag(self._child, {"nodes": ", ".join(nodes), "num_nodes": len(nodes)})
            # tags: checkpoints, failed saves, warnings, failures
            case CheckpointCommitted() as event:
                tags = {"raymega.checkpoint": event.uri, "raymega.checkpoint_step": event.step}
                self._tag(self._parent, tags)
            case SaveFailed() as event:
                self._tag(self._parent, {"raymega.failed_save": f"{event.step}: {event.reason}"})
            case BadStep() | StragglerDetected() | RoutingCollapsed() as event:
                self._tag(self._child, sign_tag(event))
            case AttemptFailed() as event:
                self._fail_attempt(event)
            case ArtefactWritten() | SamplesDrawn() as event:
                self._log_file(event)
            case _:
                pass
        # metrics last, as they need the runs opened above
        self._log_metrics(batch)
        if isinstance(batch[-1].event, RunFinished):
            self._finish(batch[-1].event)

    def close(self) -> None:
        """Do nothing: RunFinished has ended the records."""

    def is_refusal(self, error: Exception) -> bool:
        """Return whether MLflow refused the call, so that a retry would fail the same way."""
        return is_refusal(error)

    def _open_run(self, event: RunStarted) -> None:
        self._name = event.name
        run, _ = self._find_or_make_parent(event.run_id, event.name)
        self._parent = run.info.run_id
        self._floors = last_steps_in(run.data.tags.get(LAST_STEPS_TAG, ""))
        self._last_steps = {key: self._floors.get(kind_of(key), -1) for key in run.data.metrics}
        self._client.update_run(self._parent, status="RUNNING")
        self._end_orphans()
        self._write_job(event, run.data)

    def add_evaluation(
        self,
        event: TasksEvaluated,
        *,
        run_id: str,
        name: str,
        files: Mapping[str, str],
        time_s: float,
    ) -> str:
        """Write an evaluation outside a run to the parent run of its checkpoint; return MLflow's id of that.

        A value that the run has for the same step already is not written again.

        Args:
            event: Metrics, and the step of the checkpoint.
            run_id: Raymega's id of the run.
            name: Name of the run, for a new parent run where MLflow has none.
            files: Texts that are kept with the run, by file name.
            time_s: Time of the records in seconds since the epoch.
        """
        run, is_new = self._find_or_make_parent(run_id, name)
        mlflow_id = str(run.info.run_id)
        metrics = [
            metric
            for metric in metrics_in(Stamped(time_s=time_s, event=event))
            if (metric.step, metric.value)
            not in {
                (m.step, m.value) for m in self._client.get_metric_history(mlflow_id, metric.key)
            }
        ]
        self._send(mlflow_id, metrics, {})
        for file, text in files.items():
            self._client.log_text(mlflow_id, text, file)
        if is_new:
            self._client.set_terminated(mlflow_id)
        return mlflow_id

    def _find_or_make_parent(self, run_id: str, name: str) -> tuple[Run, bool]:
        """Return the parent run with raymega's ``run_id``, and whether it is new."""
        self._experiment_id = self._find_or_make_experiment()
        # A later driver finds the run of an earlier one by raymega's own id.
        run = self._search(f"tags.`{RUN_ID_TAG}` = '{run_id}'")
        if run is not None:
            return run, False
        return self._make_run(name, {RUN_ID_TAG: run_id, MLFLOW_SOURCE_NAME: "raymega train"}), True

    def _write_job(self, event: RunStarted, data: RunData) -> None:
        """Log the job as params, which MLflow never rewrites; what has changed since as tags."""
        params = params_of(event.job)
        tags = changed_fields(params, data.params) | source_tags() | {"raymega.uri": event.uri}
        if MLFLOW_RUN_NOTE not in data.tags:  # what a user wrote there stays
            tags[MLFLOW_RUN_NOTE] = describe(event.job)
        self._tag(self._parent, tags)
        self._log_params(self._parent, {n: v for n, v in params.items() if n not in data.params})
        self._log_datasets(event.job)
        self._client.log_dict(self._parent, dict(event.job), "job.yaml")
        self._client.log_dict(self._parent, environment(), "environment.yaml")

    def _log_datasets(self, job: Mapping[str, object]) -> None:
        inputs = [
            DatasetInput(
                Dataset(
                    name=each.name,
                    digest=each.digest,
                    source_type="local" if "://" not in each.source else "uri",
                    source=json.dumps({"uri": each.source}),
                ),
                [InputTag(MLFLOW_DATASET_CONTEXT, each.context)],
            )
            for each in datasets_of(job)
        ]
        if inputs:
            self._client.log_inputs(self._parent, inputs)

    def _find_or_make_experiment(self) -> str:
        """Return the experiment's id; another driver may create it between the two calls."""
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            # one of an older raymega, or made by hand, has no kind
            for name, value in EXPERIMENT_TAGS.items():
                if name not in found.tags:
                    self._client.set_experiment_tag(found.experiment_id, name, value)
            return str(found.experiment_id)
        try:
            made = self._client.create_experiment(
                self._experiment, self._artefacts, tags=EXPERIMENT_TAGS
            )
        except MlflowException as error:
            found = self._client.get_experiment_by_name(self._experiment)
            if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
                raise
            made = found.experiment_id
        return str(made)

    def _search(self, condition: str) -> Run | None:
        runs = self._client.search_runs([self._experiment_id], condition, max_results=1)
        return runs[0] if runs else None

    def _make_run(self, name: str, tags: dict[str, str]) -> Run:
        return self._client.create_run(self._experiment_id, run_name=name, tags=tags)

    def _is_child(self) -> str:
        return f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{self._parent}'"

    def _end_orphans(self) -> None:
        """End the child runs that a killed driver has left as RUNNING."""
        condition = f"{self._is_child()} and status = 'RUNNING'"
        for run in self._client.search_runs([self._experiment_id], condition):
            self._client.set_terminated(run.info.run_id, "KILLED")

    def _open_attempt(self, event: AttemptStarted) -> None:
        # The driver sends no event for the end of an attempt that is replaced.
        self._end_attempt("KILLED")
        number = str(event.attempt)
        # A repeated call finds the child run that the failed one has created.
        run = self._search(f"{self._is_child()} and tags.`{ATTEMPT_TAG}` = '{number}'")
        run = run or self._make_run(
            f"{self._name} attempt {number}",
            {MLFLOW_PARENT_RUN_ID: self._parent, ATTEMPT_TAG: number, "reason": event.reason},
        )
        self._child = run.info.run_id
        self._in_child = set()
        grid = {f"grid.{axis}": degree for axis, degree in event.grid.items()}
        plan = {f"plan.{name}": value for name, value in event.plan.items()}
        self._log_params(
            self._child, grid | plan | {"start_step": event.step, "init_from": event.source}
        )
        degrees = [f"{axis}{degree}" for axis, degree in event.grid.items() if degree > 1]
        self._tag(self._parent, {"raymega.grid": " ".join(degrees), ATTEMPT_TAG: number})

    def _log_file(self, event: ArtefactWritten | SamplesDrawn) -> None:
        if isinstance(event, ArtefactWritten):
            self._client.log_artifact(self._parent, event.path)
        else:
            name = f"samples/step-{event.step:08}.txt"
            self._client.log_text(self._parent, event.page, name)

    def _fail_attempt(self, event: AttemptFailed) -> None:
        facts = {
            "cause": event.cause, "rank": event.rank, "step": event.step,
            "decision": event.decision,
        }  # fmt: skip
        self._tag(self._child, {f"failure.{name}": value for name, value in facts.items()})
        self._end_attempt("FAILED")

    def _end_attempt(self, status: str) -> None:
        if self._child:
            self._client.set_terminated(self._child, status)
        self._child = ""

    def _finish(self, event: RunFinished) -> None:
        self._end_attempt(STATUS[event.status])
        if event.status == "superseded":  # the parent run is the other driver's
            return
        self._tag(self._parent, {"raymega.reason": event.reason} if event.reason else {})
        self._client.set_terminated(self._parent, STATUS[event.status])

    def _log_metrics(self, batch: Sequence[Stamped]) -> None:
        # steps by requests, each with its own last step: the next driver sends what a killed one did not
        share = MAX_METRICS_PER_BATCH // max(1, len(metrics_of(batch[0].event)))
        for part in chunks(batch, max(1, share)):
            self._log_request(part)

    def _log_request(self, batch: Sequence[Stamped]) -> None:
        parent: list[Metric] = []
        child: list[Metric] = []
        # Changed only after both requests succeeded: a failed batch is written again.
        last_steps, first_values = dict(self._last_steps), dict(self._first_values)
        floors, in_child = dict(self._floors), set(self._in_child)
        for item in batch:
            for metric in metrics_in(item):
                # The child run gets the first value of each metric, the parent those beyond its last step.
                if metric.key not in in_child:
                    in_child.add(metric.key)
                    child.append(metric)
                last = last_steps.get(metric.key, -1)
                if is_series(item):
                    kind = kind_of(metric.key)
                    floors[kind] = max(metric.step, floors.get(kind, -1))
                if metric.key in HIDDEN or (is_series(item) and metric.step <= last):
                    continue
                # A constant has no chart: its first value waits for one that differs.
                if last < 0 and may_be_constant(metric.key):
                    first = first_values.setdefault(metric.key, metric)
                    if first.value == metric.value:
                        continue
                    parent.append(first)
                step = last_steps[metric.key] = max(metric.step, last)
                parent.append(Metric(metric.key, metric.value, metric.timestamp, step))
        if child and self._child:
            self._send(self._child, child, {})
        if parent:
            self._send(self._parent, parent, {LAST_STEPS_TAG: json.dumps(floors)})
        self._last_steps, self._first_values = last_steps, first_values
        self._floors, self._in_child = floors, in_child

    def _send(self, run_id: str, metrics: list[Metric], tags: dict[str, str]) -> None:
        for chunk in chunks(metrics, MAX_METRICS_PER_BATCH):
            pairs = [RunTag(*each) for each in tags.items() if chunk[-1] is metrics[-1]]
            self._client.log_batch(run_id, metrics=chunk, tags=pairs)

    def _tag(self, run_id: str, tags: Mapping[str, object]) -> None:
        if not run_id:
            return
        # MLflow limits the length of values and the number per request.
        pairs = [RunTag(name, str(value)[:MAX_VALUE_CHARS]) for name, value in tags.items()]
        for chunk in chunks(pairs, MAX_PAIRS_PER_BATCH):
            self._client.log_batch(run_id, tags=chunk)

    def _log_params(self, run_id: str, params: Mapping[str, object]) -> None:
        pairs = [Param(name, str(value)[:MAX_VALUE_CHARS]) for name, value in params.items()]
        for chunk in chunks(pairs, MAX_PAIRS_PER_BATCH):
            self._client.log_batch(run_id, params=chunk)


def is_refusal(error: Exception) -> bool:
    """Return whether MLflow refused the call, so that a retry would fail the same way."""
    if isinstance(error, MlflowException):
        # client errors, except timeout (408) and rate limit (429)
        status = error.get_http_status_code()
        return 400 <= status < 500 and status not in (408, 429)
    return is_local_refusal(error)
