"""Scores requests by a checkpoint's weights on the workers of a grid of one's own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.config.grid_text import degrees_of, grid_overrides
from raymega.config.load import parse_mapping
from raymega.config.schema import ModelSection
from raymega.convert.native import model_of
from raymega.errors import ConfigError, WorkerError, raise_faults
from raymega.evaluate.recording import OF_RUN
from raymega.evaluate.requests import (
    Request,
    RequestSource,
    Scores,
    pack_requests,
    request_multiple,
    unpack_scores,
)
from raymega.messages import EntryOutput, Progress, Report
from raymega.orchestrate.core.worker_group_api import AttemptSpec, WorkerStatus
from raymega.orchestrate.workers.single_run import EntryWorkers, run_entry
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.plan.validation.registry import job_faults

ENTRY = "raymega.evaluate.worker"
LOG_DIR = Path(tempfile.gettempdir()) / "raymega-eval"
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


def plan_of(manifest: Manifest, options: EvalOptions) -> RunPlan:
    """Return the plan of an evaluation: the checkpoint's model and number format, on the options' grid.

    Raises:
        ConfigError: The grid is not legal for the model.
    """
    values = {
        "seq_len": options.seq_len or _saved(manifest, "data", "seq_len", 0),
        "dtype": _saved(manifest, "precision", "dtype", "float32"),
        "device": _saved(manifest, "cluster", "device", "cpu"),
    }
    return plan_on(model_of(manifest), options, values)


def plan_on(
    model: ModelSection,
    options: EvalOptions,
    values: Mapping[str, Any],
    *,
    name: str = "evaluation",
) -> RunPlan:
    """Return the plan of an evaluation of ``model`` on the options' grid.

    Args:
        model: Model to evaluate.
        options: Grid and overrides.
        values: Length ``seq_len``, ``dtype`` and ``device`` of the run; ``cpus`` of a worker, if given.
        name: Name of the workers in Ray.

    Raises:
        ConfigError: The grid is not legal for the model.
    """
    grid, degrees = grid_overrides(options.grid), degrees_of(options.grid)
    cpus = values.get("cpus") or (os.cpu_count() or 1) // prod(degrees.values()) or CPUS_OF_MANY
    raw: dict[str, Any] = {
        "run": {"name": name, "steps": 1, "eval_samples": 0},
        "model": model.model_dump(mode="json") | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        # rows of several requests, whatever the run's rows were
        "data": {
            "path": "synthetic",
            "seq_len": min(values["seq_len"] or model.max_positions, model.max_positions),
            "global_batch_size": 2**14,
            "packing": "best_fit",
            "document_multiple": 2 * degrees["cp"],
        },
        "optimizer": {"lr": 1e-3},
        "precision": {"dtype": values["dtype"]},
        "checkpoint": {"every": 0},
        "tracking": {"mlflow_uri": "off"},
        "cluster": {
            "device": values["device"],
            "cpus_per_worker": cpus,
        },
    }
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
    multiple = request_multiple(plan)
    num_rows = RequestSource(requests, seq_len=plan.job.data.seq_len, multiple=multiple).num_rows

    def hear(report: Report | WorkerStatus) -> None:
        if isinstance(report, EntryOutput):
            answers.append(report.data)
        elif isinstance(report, Progress) and report.rank == 0:
            on_rows(report.step, num_rows)

    uri = f"{checkpoint.store.uri}/{checkpoint.manifest.key}"
    done = run_entry(
        plan, _spec(plan, uri, pack_requests(requests)), ENTRY, log_dir=LOG_DIR, on_report=hear
    )
    if done.fault is not None:
        raise WorkerError(done.fault)
    (answer,) = answers
    return unpack_scores(answer, requests)


class ScoringWorkers:
    """Workers that score the same requests by one checkpoint after the other; used from one thread."""

    def __init__(self, plan: RunPlan, requests: Sequence[Request]) -> None:
        """Prepare; nothing is started."""
        self._plan, self._requests = plan, requests
        self._packed = pack_requests(requests)
        self._workers = EntryWorkers(plan, ENTRY, log_dir=LOG_DIR)
        self._num_runs = 0

    def score(self, uri: str) -> list[Scores]:
        """Return the scores of the requests by the checkpoint at ``uri``.

        Raises:
            WorkerError: A worker failed.
            CapacityError: The cluster has no room for the workers.
        """
        answers: list[bytes] = []

        def hear(report: Report | WorkerStatus) -> None:
            if isinstance(report, EntryOutput):
                answers.append(report.data)

        self._num_runs += 1
        spec = _spec(self._plan, uri, self._packed, attempt=self._num_runs)
        done = self._workers.run(spec, on_report=hear)
        if done.fault is not None:
            raise WorkerError(done.fault)
        (answer,) = answers
        return unpack_scores(answer, self._requests)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()


def _spec(plan: RunPlan, uri: str, packed: bytes, *, attempt: int = 0) -> AttemptSpec:
    return AttemptSpec(
        plan_json=plan.to_json(), run_uri=uri, attempt=attempt, restore=uri, entry_input=packed
    )


def _saved(manifest: Manifest, section: str, field: str, default: Any) -> Any:
    """Return a field of the run's job, or ``default`` where the manifest does not have it."""
    values = manifest.job.get(section)
    return values.get(field, default) if isinstance(values, dict) else default
