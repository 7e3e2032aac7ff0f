"""Evaluation of a checkpoint on a task: plan a grid, score the task's requests on its workers, judge.

`cli/evaluate.py` prints the report.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.config.load import parse_mapping
from raymega.convert.native import model_of
from raymega.errors import ConfigError, Fault, WorkerError, raise_faults
from raymega.evaluate.recording import OF_RUN, MlflowRun, find_mlflow_run, recorded
from raymega.evaluate.report import EvalReport as EvalReport
from raymega.evaluate.requests import (
    Request,
    RequestSource,
    Scores,
    pack_requests,
    unpack_scores,
)
from raymega.evaluate.tasks.table import TASKS
from raymega.evaluate.tasks.task import Questions, Settings
from raymega.evaluate.tokenizer import ModelTokenizer, find_tokenizer
from raymega.messages import EntryOutput, Progress, Report
from raymega.orchestrate.core.worker_group_api import AttemptSpec, WorkerStatus
from raymega.orchestrate.workers.single_run import run_entry
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.plan.validation.registry import job_faults

ENTRY = "raymega.evaluate.worker"
CPUS_OF_MANY = 0.1
"""CPUs that a worker reserves where the machine has fewer than there are workers."""

OnRows = Callable[[int, int], None]
"""Function that is told how many rows of tokens are done, and of how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """Options of an evaluation.

    Attributes:
        grid: Degrees of the grid, such as ``tp=2,pp=2``; empty is one rank.
        overrides: Texts ``section.field=value`` that override fields of the run's job.
        tokenizer: Tokenizer file; None looks for the model's.
        seq_len: Number of tokens that the model reads at once; 0 is the run's.
        stride: Number of tokens by which a window moves on; 0 is the task's own.
        limit: Number of documents, or windows, to evaluate; 0 is all.
        mlflow: Place of the metrics: ``run`` is the run's own MLflow, ``off`` none; else a tracking URI.
    """

    grid: str = ""
    overrides: tuple[str, ...] = ()
    tokenizer: Path | None = None
    seq_len: int = 0
    stride: int = 0
    limit: int = 0
    mlflow: str = OF_RUN


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """An evaluation that is ready to run.

    Attributes:
        task: Name of the task.
        checkpoint: Checkpoint whose weights are evaluated.
        plan: Plan of the grid that evaluates.
        questions: Requests of the task, and what judges their scores.
        mlflow_run: MLflow run that gets the metrics; None for none.
    """

    task: str
    checkpoint: Checkpoint
    plan: RunPlan
    questions: Questions
    mlflow_run: MlflowRun | None

    def run(self, on_rows: OnRows) -> EvalReport:
        """Score the requests on the plan's workers, judge and record; the process is connected to Ray.

        Raises:
            WorkerError: A worker failed.
            CapacityError: The cluster has no room for the grid.
        """
        began, manifest, questions = time.monotonic(), self.checkpoint.manifest, self.questions
        scores = score(self.checkpoint, self.plan, questions.requests, on_rows=on_rows)
        metrics, samples = questions.judge(scores)
        report = EvalReport(
            task=self.task,
            checkpoint=f"{self.checkpoint.store.uri}/{manifest.key}",
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


def prepare_evaluation(uri: str, task: str, data: Path, options: EvalOptions) -> Evaluation:
    """Return an evaluation that is ready to run, or refuse before anything starts.

    Args:
        uri: URI of a run's folder, of one of its checkpoints or of a manifest.
        task: Name of a task.
        data: File of the task.
        options: Grid and lengths.

    Raises:
        ConfigError: The checkpoint, task, file or grid is wrong.
    """
    raise_faults(ConfigError, [*_task_faults(task), *_file_faults(task, data)])
    checkpoint = open_checkpoint(uri)
    plan = plan_of(checkpoint.manifest, options)
    seq_len = plan.job.data.seq_len
    tokenizer = find_tokenizer(checkpoint, options.tokenizer)
    raise_faults(
        ConfigError,
        [*_stride_faults(options.stride, seq_len), *_vocabulary_faults(tokenizer, plan)],
    )
    settings = Settings(seq_len=seq_len, stride=options.stride, limit=options.limit)
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
        checkpoint=checkpoint,
        plan=plan,
        questions=questions,
        mlflow_run=find_mlflow_run(checkpoint, options.mlflow),
    )


def plan_of(manifest: Manifest, options: EvalOptions) -> RunPlan:
    """Return the plan of an evaluation: the checkpoint's model and number format, on the options' grid.

    Raises:
        ConfigError: The grid is not legal for the model.
    """
    degrees = dict(pair.split("=", 1) for pair in options.grid.split(",") if "=" in pair)
    world_size = 1
    for axis in ("tp", "cp", "pp", "dp"):
        degree = degrees.get(axis, "1").strip()
        world_size *= int(degree) if degree.isdecimal() else 1
    cp = degrees.get("cp", "1").strip()
    model = model_of(manifest).model_dump(mode="json")
    model |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    seq_len = options.seq_len or _saved(manifest, "data", "seq_len", model["max_positions"])
    cpus = (os.cpu_count() or 1) // world_size or CPUS_OF_MANY
    raw: dict[str, Any] = {
        "run": {"name": "evaluation", "steps": 1, "eval_samples": 0},
        "model": model,
        # rows of several requests, whatever the run's rows were
        "data": {
            "path": "synthetic",
            "seq_len": min(seq_len, model["max_positions"]),
            "global_batch_size": 2**20,
            "packing": "best_fit",
            "document_multiple": 2 * int(cp) if cp.isdecimal() else 1,
        },
        "optimizer": {"lr": 1e-3},
        "precision": {"dtype": _saved(manifest, "precision", "dtype", "float32")},
        "checkpoint": {"every": 0},
        "tracking": {"mlflow_uri": "off"},
        "cluster": {
            "device": _saved(manifest, "cluster", "device", "cpu"),
            "cpus_per_worker": cpus,
        },
    }
    grid = [f"parallel.{pair.strip()}" for pair in options.grid.split(",") if pair]
    parsed = parse_mapping(raw).with_overrides([*grid, *options.overrides])
    raise_faults(ConfigError, [*parsed.faults, *job_faults(parsed.values)])
    return make_plan(parsed.job())


def score(
    checkpoint: Checkpoint, plan: RunPlan, requests: Sequence[Request], *, on_rows: OnRows
) -> list[Scores]:
    """Return the scores of ``requests`` by the checkpoint's weights, from ``plan``'s workers.

    Raises:
        WorkerError: A worker failed.
        CapacityError: The cluster has no room for the workers.
    """
    answers: list[bytes] = []
    shape = plan.job.data
    source = RequestSource(requests, seq_len=shape.seq_len, multiple=shape.document_multiple)
    num_rows = source.num_rows

    def hear(report: Report | WorkerStatus) -> None:
        if isinstance(report, EntryOutput):
            answers.append(report.data)
        elif isinstance(report, Progress) and report.rank == 0:
            on_rows(report.step, num_rows)

    spec = AttemptSpec(
        plan_json=plan.to_json(),
        run_uri=checkpoint.store.uri,
        attempt=0,
        restore=f"{checkpoint.store.uri}/{checkpoint.manifest.key}",
        entry_input=pack_requests(requests),
    )
    log_dir = Path(tempfile.gettempdir()) / "raymega-eval"
    done = run_entry(plan, spec, ENTRY, log_dir=log_dir, on_report=hear)
    if done.fault is not None:
        raise WorkerError(done.fault)
    (answer,) = answers
    return unpack_scores(answer, requests)


def _saved(manifest: Manifest, section: str, field: str, default: Any) -> Any:
    """Return a field of the run's job, or ``default`` where the manifest does not have it."""
    values = manifest.job.get(section)
    return values.get(field, default) if isinstance(values, dict) else default


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
    rule = f"a task is one of {', '.join(TASKS)}"
    return [Fault(fact=f"--task {task}", rule=rule, remedy="give --task lambada, for example")]


def _file_faults(task: str, data: Path) -> list[Fault]:
    if data.is_file():
        return []
    fact = f"--data {data} {'is no file' if data.exists() else 'does not exist'}"
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
