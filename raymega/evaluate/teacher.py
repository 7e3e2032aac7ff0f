"""Largest logits of a teacher for the rows of a job's datasets, computed once by a checkpoint on any grid and stored."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raymega.checkpoint.load.fingerprint import FINGERPRINT, fingerprint_at
from raymega.checkpoint.load.pinned_source import teacher_faults
from raymega.config.grid_text import grid_overrides
from raymega.config.load import parse_mapping
from raymega.config.schema import Job
from raymega.data.distillation.stored_logits import (
    VOCABULARY,
    content_of,
    create_logits,
    dataset_rows,
    finish_logits,
    row_cut,
)
from raymega.errors import ConfigError, Fault, WorkerError, raise_faults
from raymega.evaluate.scoring import OnRows
from raymega.evaluate.stored import Kept, opened_model
from raymega.messages import Progress, Report
from raymega.orchestrate.core.worker_group_api import AttemptSpec, WorkerStatus
from raymega.orchestrate.workers.single_run import run_entry
from raymega.plan.distillation.teacher import teacher_job
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.plan.validation.registry import job_faults
from raymega.session import session_at

ENTRY = "raymega.evaluate.teacher_worker"
LOG_DIR = Path(tempfile.gettempdir()) / "raymega-teacher"
KEPT = Kept(
    field="distillation.teacher_checkpoint",
    model="a teacher is a model with weights",
    stored="the logits are written",
    other="distillation.teacher=live",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTeacher:
    """Logits that were written: the dataset, its rows, logits of a token, and the checkpoint that they are of."""

    path: str
    rows: int
    top_k: int
    checkpoint: str


def store_teacher(
    job: Job,
    *,
    checkpoint: str = "",
    grid: str = "",
    address: str = "auto",
    on_rows: OnRows | None = None,
) -> list[StoredTeacher]:
    """Write a teacher's largest logits for the training split of a job's datasets.

    Args:
        job: Job that will read them; it says how rows are cut, and how many logits a token has.
        checkpoint: URI of the teacher; empty for distillation.teacher_checkpoint.
        grid: Degrees of the grid that computes them, such as ``tp=2``; empty is one rank.
        address: Ray cluster, as of `raymega train`.
        on_rows: Function that is told how many rows are done, and of how many.

    Raises:
        ConfigError: The job has no teacher, its checkpoint is another model's, or a dataset is elsewhere.
        WorkerError: A worker failed.
    """
    uri = checkpoint or job.distillation.teacher_checkpoint
    opened = opened_model(uri, grid, [*job.data.datasets], KEPT, _faults(job))
    plan = teacher_plan_on(job, grid)
    raise_faults(ConfigError, teacher_faults(uri, plan.job.model))
    key = f"{opened.store.uri}/{opened.manifest.key}"
    with session_at(address):
        return [
            _store(job, path, plan, key, on_rows or (lambda _done, _total: None))
            for path in job.data.datasets
        ]


def teacher_plan_on(job: Job, grid: str) -> RunPlan:
    """Return the plan of the teacher of a job, alone on a grid of its own; its job cuts rows as ``job`` does.

    Raises:
        ConfigError: The grid is not legal for the teacher's model.
    """
    # the grid of the run has nothing to do with that of its teacher
    values = teacher_job(job).model_dump(mode="json")
    values |= {"parallel": {}, "schedule": {"micro_batch_size": job.schedule.micro_batch_size}}
    values["cluster"]["num_workers"] = "grid"
    parsed = parse_mapping(values).with_overrides(grid_overrides(grid))
    raise_faults(ConfigError, [*parsed.faults, *job_faults(parsed.values)])
    return make_plan(parsed.job())


def _faults(job: Job) -> Iterator[Fault]:
    if not job.distillation.is_on:
        yield Fault(
            fact="distillation.loss_type=none",
            rule="the job has no teacher",
            remedy="set distillation.loss_type=forward_kl",
        )


def _store(job: Job, path: str, plan: RunPlan, key: str, on_rows: OnRows) -> StoredTeacher:
    """Let the workers fill the files of one dataset, then give these their names."""
    # files of the whole size, which every worker finds by the dataset's path
    num_rows, k = dataset_rows(plan.job, path).num_windows, job.distillation.top_k
    create_logits(path, (num_rows, job.data.seq_len, k))

    def hear(report: Report | WorkerStatus) -> None:
        if isinstance(report, Progress) and report.rank == 0:
            on_rows(report.step, num_rows)

    spec = AttemptSpec(
        plan_json=plan.to_json(),
        run_uri=key,
        attempt=0,
        restore=key,
        entry_input=path.encode(),
    )
    done = run_entry(plan, spec, ENTRY, log_dir=LOG_DIR, on_report=hear)
    # a teacher that failed half-way leaves files that no reader takes
    if done.fault is not None:
        raise WorkerError(done.fault)
    origin = {"checkpoint": key, FINGERPRINT: fingerprint_at(key)}
    finish_logits(path, logits_how(job, path) | origin)
    return StoredTeacher(path=path, rows=num_rows, top_k=k, checkpoint=key)


def logits_how(job: Job, path: str) -> dict[str, object]:
    """Return what the logits of a dataset are of besides the teacher: how rows are cut, their tokens, the vocabulary."""
    return {
        **row_cut(job.data),
        VOCABULARY: job.model.vocab_size,
        "top_k": job.distillation.top_k,
        "content": content_of(path),
    }
