"""Evaluation of a checkpoint on a task: prepare its requests, score them on a grid's workers, judge.

`cli/evaluate.py` prints the report.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from raymega.checkpoint.format.manifest import list_manifests
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.errors import ConfigError, Fault, WorkerError, raise_faults
from raymega.evaluate.plan import EvalOptions as EvalOptions
from raymega.evaluate.plan import plan_of as plan_of
from raymega.evaluate.recording import MlflowRun, find_mlflow_run, recorded
from raymega.evaluate.report import EvalReport as EvalReport
from raymega.evaluate.requests import Scores
from raymega.evaluate.scoring import OnRows as OnRows
from raymega.evaluate.scoring import score as score
from raymega.evaluate.tasks.table import TASKS
from raymega.evaluate.tasks.task import Questions, Settings
from raymega.evaluate.tokenizer import ModelTokenizer, find_tokenizer
from raymega.extras import import_extra
from raymega.plan.run_plan import RunPlan
from raymega.session import session_at

YAML_SUFFIXES = (".yaml", ".yml")
MOST_PRUNED = 3
"""Checkpoints in a row that a run under way may prune before they are loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """An evaluation that is ready to run.

    Attributes:
        task: Name of the task.
        uri: URI that the caller gave.
        checkpoint: Checkpoint whose weights are evaluated, the newest that ``uri`` names.
        plan: Plan of the grid that evaluates.
        questions: Requests of the task, and what judges their scores.
        mlflow_run: MLflow run that gets the metrics; None for none.
    """

    task: str
    uri: str
    checkpoint: Checkpoint
    plan: RunPlan
    questions: Questions
    mlflow_run: MlflowRun | None

    def run(self, on_rows: OnRows) -> EvalReport:
        """Score the requests on the plan's workers, judge and record; the process is connected to Ray.

        Raises:
            WorkerError: A worker failed.
            CapacityError: The cluster has no room for the grid.
            ConfigError: The checkpoint is gone, and ``uri`` names no other.
        """
        began, questions = time.monotonic(), self.questions
        (store, manifest), scores = self._score(on_rows)
        metrics, samples = questions.judge(scores)
        report = EvalReport(
            task=self.task,
            checkpoint=f"{store.uri}/{manifest.key}",
            step=manifest.step,
            metrics=metrics,
            documents=questions.documents,
            tokens=sum(request.num_targets for request in questions.requests),
            words=questions.words,
            grid=self.plan.grid.degrees(),
            samples=samples,
            notes=questions.notes,
            seconds=time.monotonic() - began,
        )
        return recorded(report, self.mlflow_run)

    def _score(self, on_rows: OnRows) -> tuple[Checkpoint, list[Scores]]:
        """Return the scores and their checkpoint: a run under way may prune the newest while the workers start."""
        checkpoint, requests = self.checkpoint, self.questions.requests
        for _ in range(MOST_PRUNED):
            try:
                return checkpoint, score(checkpoint, self.plan, requests, on_rows=on_rows)
            except WorkerError:
                if checkpoint.manifest.key in list_manifests(checkpoint.store):
                    raise
                checkpoint = open_checkpoint(self.uri)
        return checkpoint, score(checkpoint, self.plan, requests, on_rows=on_rows)


class Ready(Protocol):
    """An evaluation that is ready to run."""

    def run(self, on_rows: OnRows) -> EvalReport:
        """Score, judge and record; the process is connected to Ray."""


def evaluate_each(
    uris: Sequence[str],
    task: str,
    data: Path | str | None,
    *,
    options: EvalOptions | None = None,
    address: str = "auto",
    on_rows: OnRows | None = None,
) -> list[EvalReport]:
    """Evaluate the newest checkpoint of each URI on one task; see `raymega.api.evaluate`.

    Every checkpoint is looked at before the first one is evaluated.
    """
    options = options or EvalOptions()
    file = None if data is None else Path(data)
    ready = [prepare_evaluation(uri, task, file, options) for uri in uris]
    with session_at(address):
        return [each.run(on_rows or (lambda _done, _total: None)) for each in ready]


def prepare_evaluation(uri: str, task: str, data: Path | None, options: EvalOptions) -> Ready:
    """Return an evaluation that is ready to run, or refuse before anything starts.

    Args:
        uri: URI of a run's folder, of one of its checkpoints or of a manifest.
        task: Name of a task, or path of a YAML file of lm-eval.
        data: File of the task; None for the dataset that a YAML file names.
        options: Grid and lengths.

    Raises:
        ConfigError: The checkpoint, task, file or grid is wrong.
    """
    if task.endswith(YAML_SUFFIXES):
        return _prepare_yaml(uri, Path(task), data, options)
    raise_faults(ConfigError, [*_task_faults(task), *_file_faults(task, data)])
    assert data is not None, "a task without a file has a fault"
    checkpoint = open_checkpoint(uri)
    plan = plan_of(checkpoint, options)
    seq_len = plan.job.data.seq_len
    tokenizer = find_tokenizer(checkpoint, options.tokenizer)
    raise_faults(
        ConfigError,
        [*_stride_faults(options.stride, seq_len), *_vocabulary_faults(tokenizer, plan)],
    )
    settings = Settings(
        seq_len=seq_len,
        stride=options.stride,
        limit=options.limit,
        vision=plan.job.model.vision,
    )
    questions = TASKS[task](data, tokenizer, settings)
    if not questions.requests:
        fact = f"--data {data} has nothing to evaluate"
        rule = "a task needs at least one document"
        raise ConfigError(Fault(fact=fact, rule=rule, remedy="give the path of its test set"))
    if options.limit:
        note = f"--limit {options.limit}: the first part of {data.name}; published figures are of the whole set"
        questions = replace(questions, notes=(*questions.notes, note))
    return Evaluation(
        task=task,
        uri=uri,
        checkpoint=checkpoint,
        plan=plan,
        questions=questions,
        mlflow_run=find_mlflow_run(checkpoint, options.mlflow),
    )


def _prepare_yaml(uri: str, file: Path, data: Path | None, options: EvalOptions) -> Ready:
    """Return an evaluation on a task of lm-eval, which is imported here: it takes seconds, and is an extra."""
    missing = (
        [] if file.is_file() else [_no_file(f"--task {file}", "a task of lm-eval is a YAML file")]
    )
    if data is not None and not data.is_file():
        missing.append(_no_file(f"--data {data}", "it takes the place of the task's dataset"))
    raise_faults(ConfigError, [*missing, *_unused_faults(file, options)])
    import_extra("lm_eval", extra="eval", purpose=f"--task {file}")
    from raymega.evaluate.harness.yaml_task import prepare_yaml

    checkpoint = open_checkpoint(uri)
    return prepare_yaml(file, data, checkpoint, plan_of(checkpoint, options), options)


def _unused_faults(file: Path, options: EvalOptions) -> list[Fault]:
    given = {"--stride": options.stride, "--tokenizer": options.tokenizer}
    return [
        Fault(
            fact=f"{name} {value} with --task {file}",
            rule="lm-eval cuts texts itself, by the model's own tokenizer, into windows that do not overlap",
            remedy=f"leave {name} out",
        )
        for name, value in given.items()
        if value
    ]


def _no_file(what: str, rule: str) -> Fault:
    return Fault(fact=f"{what} is no file", rule=rule, remedy="give its path")


def _vocabulary_faults(tokenizer: ModelTokenizer, plan: RunPlan) -> list[Fault]:
    size, rows = tokenizer.vocab_size, plan.job.model.vocab_size
    if size <= rows:
        return []
    return [
        Fault(
            fact=f"the tokenizer of {tokenizer.source} has {size:,} tokens",
            rule=f"the model has a vocabulary of {rows:,}",
            remedy="give the model's own with --tokenizer FOLDER/tokenizer.json",
        )
    ]


def _task_faults(task: str) -> list[Fault]:
    if task in TASKS:
        return []
    rule = f"a task is one of {', '.join(TASKS)}, or a YAML file of lm-eval"
    return [Fault(fact=f"--task {task}", rule=rule, remedy="give --task lambada, for example")]


def _file_faults(task: str, data: Path | None) -> list[Fault]:
    if data is not None and data.is_file():
        return []
    fact = (
        f"--data {data} {'is no file' if data.exists() else 'does not exist'}"
        if data
        else "no --data"
    )
    rule = f"the task {task} reads one file"
    return [Fault(fact=fact, rule=rule, remedy="give the path of its test set")]


def _stride_faults(stride: int, seq_len: int) -> list[Fault]:
    if stride <= seq_len:
        return []
    return [
        Fault(
            fact=f"--stride {stride}",
            rule=f"a window has {seq_len} tokens, and moves on by at most as many",
            remedy=f"give --stride {seq_len} or less",
        )
    ]
