"""Evaluates a checkpoint on a task of lm-eval: a YAML file, which lm-eval itself reads and judges."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.api.task import Task
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from raymega.checkpoint.tools.handle import Checkpoint
from raymega.errors import ConfigError, Fault, one_line
from raymega.evaluate.harness.adapter import RaymegaLM
from raymega.evaluate.plan import EvalOptions
from raymega.evaluate.recording import MlflowRun, find_mlflow_run, recorded
from raymega.evaluate.report import EvalReport
from raymega.evaluate.scoring import OnRows
from raymega.plan.run_plan import RunPlan

BOOTSTRAP_ITERS = 1000
"""Resamplings for the standard error of metrics that have no formula of it; lm-eval's own 100,000 take minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class YamlEvaluation:
    """A task of lm-eval that is ready to run.

    Attributes:
        name: Name of the task.
        checkpoint: Checkpoint whose weights are evaluated.
        plan: Plan of the grid that evaluates.
        task: Task with its documents.
        options: Options of the evaluation.
        notes: Facts that a reader must know to compare the result, one line each.
        mlflow_run: MLflow run that gets the metrics; None for none.
    """

    name: str
    checkpoint: Checkpoint
    plan: RunPlan
    task: Task
    options: EvalOptions
    notes: tuple[str, ...]
    mlflow_run: MlflowRun | None

    def run(self, on_rows: OnRows) -> EvalReport:
        """Let lm-eval ask and judge, and record the result; the process is connected to Ray.

        Raises:
            WorkerError: A worker failed.
            CapacityError: The cluster has no room for the grid.
        """
        began, manifest = time.monotonic(), self.checkpoint.manifest
        model = RaymegaLM(self.checkpoint, self.plan, on_rows=on_rows)
        found = simple_evaluate(
            model=model,
            tasks=[self.task],
            limit=self.options.limit or None,
            bootstrap_iters=BOOTSTRAP_ITERS,
            task_manager=TaskManager(include_defaults=False),
        )
        assert found is not None, "lm-eval returns None on other ranks than 0 only"
        report = EvalReport(
            task=self.name,
            checkpoint=f"{self.checkpoint.store.uri}/{manifest.key}",
            step=manifest.step,
            metrics=_metrics(found["results"][self.name]),
            documents=int(found["n-samples"][self.name]["effective"]),
            tokens=model.num_tokens,
            words=0,
            grid=self.plan.grid.degrees(),
            samples=[_plain(each) for each in found["samples"][self.name]],
            notes=self.notes,
            seconds=time.monotonic() - began,
        )
        return recorded(report, self.mlflow_run)


def prepare_yaml(
    file: Path, data: Path | None, checkpoint: Checkpoint, plan: RunPlan, options: EvalOptions
) -> YamlEvaluation:
    """Return a task of lm-eval that is ready to run, or refuse before anything starts.

    Args:
        file: YAML file of one task.
        data: JSON lines that take the place of the task's dataset; None for the dataset that the file names.
        checkpoint: Checkpoint to evaluate.
        plan: Plan of the grid that evaluates.
        options: Options of the evaluation.

    Raises:
        ConfigError: lm-eval cannot read the task or its dataset.
    """
    try:
        config = load_yaml(file, resolve_func=True)
        if data is not None:
            config = _with_data(config, data)
        tasks = TaskManager(include_defaults=False).load([config])["tasks"]
    except Exception as error:
        raise ConfigError(
            _task_fault(file, one_line(f"{type(error).__name__}: {error}", 300))
        ) from error
    if len(tasks) != 1:
        raise ConfigError(_task_fault(file, f"it has {len(tasks)} tasks: {', '.join(tasks)}"))
    ((name, task),) = tasks.items()
    notes = [
        f"lm-eval's task {name}, version {task.VERSION}, of {file}{f' on {data}' if data else ''}"
    ]
    if options.limit:
        notes.append(
            f"--limit {options.limit}: the first part of the set; published figures are of the whole set"
        )
    return YamlEvaluation(
        name=name,
        checkpoint=checkpoint,
        plan=plan,
        task=task,
        options=options,
        notes=tuple(notes),
        mlflow_run=find_mlflow_run(checkpoint, options.mlflow),
    )


def _with_data(config: dict[str, Any], data: Path) -> dict[str, Any]:
    """Return the task's settings with a local file in place of its dataset."""
    kept = {
        name: value
        for name, value in config.items()
        if name not in {"dataset_name", "training_split", "validation_split", "fewshot_split"}
    }
    files = {"test": str(data.absolute())}
    return kept | {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
    }


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return the metrics, without the name of lm-eval's filter where it filters nothing."""
    return {
        name.removesuffix(",none").replace(",", "."): float(value)
        for name, value in values.items()
        if "," in name and isinstance(value, int | float)
    }


def _plain(sample: dict[str, Any]) -> dict[str, object]:
    """Return what a reader needs of lm-eval's record of a sample."""
    kept = ("doc_id", "doc", "target", "filtered_resps")
    return {name: sample[name] for name in kept if name in sample}


def _task_fault(file: Path, fact: str) -> Fault:
    return Fault(
        fact=f"--task {file}: {fact}",
        rule="it is a YAML file of one task that lm-eval loads, with its dataset",
        remedy="correct it; `lm_eval validate` says more. --data FILE.jsonl takes the place of its dataset",
    )
