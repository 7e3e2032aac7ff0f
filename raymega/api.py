"""Functions behind the commands: load a job, plan it, train it, verify it.

They connect the other packages and hold no logic of their own. What Ray, stores, checkpoints, verify or a report need is
imported inside the functions that use it: a plan is made in a tenth of a second, and importing the driver takes one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from raymega.config.grid_text import override_list
from raymega.config.load import parse_job
from raymega.config.schema import Job
from raymega.errors import ConfigError, DataError, RaymegaError, raise_faults
from raymega.orchestrate.jobs.submission import credential_faults, relative_path_faults
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.plan.validation.plugins import without_broken_parts
from raymega.plan.validation.registry import job_faults
from raymega.planner.search.auto_parallel import choose_layout, planned_for
from raymega.planner.search.selection import Choice
from raymega.plugins import with_versions

if TYPE_CHECKING:
    from raymega.checkpoint.tools.handle import Checkpoint
    from raymega.evaluate.run import EvalOptions, EvalReport, OnRows
    from raymega.events import RunFinished
    from raymega.plan.packing.step_estimate import PackedStep
    from raymega.tracking.sink import Sink
    from raymega.verify.run import Options, Report, Watcher


def load_job(
    path: Path | str,
    overrides: Iterable[str] = (),
    *,
    is_for_training: bool = False,
    is_in_ray_job: bool = False,
) -> Job:
    """Read and check a job file.

    Args:
        path: Path of the YAML file.
        overrides: Texts ``section.field=value`` that override fields of the file.
        is_for_training: Whether to check the job's data and checkpoint store too.
        is_in_ray_job: Whether the working folder is Ray's copy, in which relative paths are refused.

    Raises:
        ConfigError: The job has faults; the error carries all of them.
        PlanError: The job leaves its layout to the planner, which finds none.
    """
    job, _ = load_chosen(
        path, overrides, is_for_training=is_for_training, is_in_ray_job=is_in_ray_job
    )
    return job


def load_chosen(
    path: Path | str,
    overrides: Iterable[str] = (),
    *,
    is_for_training: bool = False,
    is_in_ray_job: bool = False,
    defaults: Mapping[str, str] | None = None,
) -> tuple[Job, Choice | None]:
    """Return the job as :func:`load_job` does, and the planner's choice of a layout if it made one.

    ``defaults`` has values, by dotted path, of fields that neither the file nor an override sets.
    """
    overrides = override_list(overrides)
    parsed = parse_job(path, overrides)
    unset = [f"{field}={text}" for field, text in (defaults or {}).items()
             if field not in parsed.stated]  # fmt: skip
    if unset:
        parsed = parse_job(path, [*overrides, *unset])
    # Plug-ins get the versions that are installed, which checkpoints keep.
    if modules := parsed.values.get("plugins.modules"):
        parsed = parsed.with_overrides([f"plugins.modules={json.dumps(with_versions(modules))}"])
    # A part that is not there has its fault before the planner reads its facts.
    left, broken = without_broken_parts(parsed.values)
    parsed = replace(parsed, values=left, faults=(*parsed.faults, *broken))
    # A length in tokens or epochs becomes one in steps, on which schedules and plans depend.
    if parsed.values.get("run.tokens") or parsed.values.get("run.epochs"):
        from raymega.data.blends.epochs import budget_steps

        parsed = parsed.with_steps(*budget_steps(parsed.values))
    # The planner fills in the layout before the rules between fields are checked.
    choice = choose_layout(parsed)
    if choice is not None:
        parsed = parsed.with_overrides(choice.overrides)
    if is_for_training:
        from raymega.training_checks import outside_faults, with_pins

        parsed = with_pins(parsed)
    faults = [*parsed.faults, *job_faults(parsed.values), *credential_faults(parsed.values)]
    if is_in_ray_job:
        faults += relative_path_faults(Path(path), overrides)
    if is_for_training:
        faults += outside_faults(parsed.values)
    raise_faults(ConfigError, faults)
    job = parsed.job()
    if is_for_training and job.run.eval_tasks:
        from raymega.evaluate.tasks_beside import open_run_tasks

        open_run_tasks(job)
    return job, choice


def plan(job: Job) -> RunPlan:
    """Return the run plan: everything that follows from the job before a process starts."""
    return make_plan(job)


def look_at_packing(plan: RunPlan) -> tuple[PackedStep | None, str]:
    """Return the cost of the run's first step of packed documents, or why it is unknown here."""
    from raymega.data.samples import first_rows
    from raymega.plan.packing.step_estimate import packed_step

    try:
        rows = first_rows(plan.job)
    except (ConfigError, DataError) as error:
        return None, str(error.faults[0])
    if not rows:
        path, field = next(iter(plan.job.data.datasets.items()))
        return None, f"{field}={path!r} is not on this machine"
    return packed_step(plan, rows), ""


def train(
    job: Job,
    *,
    address: str = "auto",
    sinks: Sequence[Sink] = (),
    choice: Choice | None = None,
    entry: str | None = None,
) -> RunFinished:
    """Run the driver until the run ends; a run name that exists continues that run.

    Args:
        job: Job of :func:`load_job`.
        address: ``auto`` joins a running Ray or starts a local one; ``local``; ``HOST:PORT``.
        sinks: Sinks in addition to metrics.jsonl, MLflow and the pictures; closed at the end.
        choice: Choice of the planner with its reasons, which is saved with the run; None without one.
        entry: Module that workers run; None for the package's own.

    Raises:
        ConfigError: The run exists with another model, seed or data, its store cannot hold a lease, or a
            node failed its checks.
        LeaseError: Another driver holds the run, or has taken it from this one.
        CapacityError: The cluster has no room.
        PreemptedError: The run was asked to stop, and saved.
        WorkerError: The retry budget is spent.
        RaymegaError: Another error ended the run; its class has the exit code.
    """
    from raymega.launch import run_driver
    from raymega.orchestrate.core.worker_group_api import TRAIN_ENTRY

    return run_driver(job, address=address, sinks=sinks, choice=choice, entry=entry or TRAIN_ENTRY)


def dry_run(job: Job, *, address: str = "auto") -> RunPlan:
    """Do everything that :func:`train` does before it starts a worker, with the same errors."""
    from raymega.orchestrate.cluster.node_inventory import list_nodes, node_memory
    from raymega.orchestrate.core.clock import SystemClock
    from raymega.orchestrate.core.rank_placement import block_size, place_ranks
    from raymega.orchestrate.run_store.journal import open_record
    from raymega.plan.snapshot_replicas import memory_faults
    from raymega.session import close_session, open_session
    from raymega.storage.registry import open_store

    plan = make_plan(job)
    open_record(open_store(job.run_uri), job, now=SystemClock().timestamp())
    open_session(address)
    try:
        nodes = list_nodes(job.cluster)
        node_of = place_ranks(nodes, plan.grid, block=block_size(plan.grid, job.parallel))
        raise_faults(ConfigError, memory_faults(plan, node_of, node_memory()))
    finally:
        close_session()
    return plan


def calibrate(plan: RunPlan, *, name: str) -> str:
    """Measure the connected cluster under ``plan``'s workers, and return an accelerator's YAML.

    Figures that are not measured come from the catalogue's entry for ``cluster.accelerator``, or cpu.

    Raises:
        WorkerError: A worker failed, or the cluster has no room.
    """
    from raymega.orchestrate.diagnostics.calibrate import calibrate_cluster
    from raymega.planner.calibration.fit import accelerator_yaml

    job = plan.job
    base = planned_for({"cluster.accelerator": job.cluster.accelerator})
    device = calibrate_cluster(plan, base, name=name)
    like = base.name if base.name in CATALOGUE else "cpu"
    comment = f"Measured by raymega doctor on {plan.grid.world_size} workers of {job.run.name}."
    return accelerator_yaml(device, like=like, comment=comment)


def verify(job: Job, *, options: Options | None = None, watcher: Watcher | None = None) -> Report:
    """Test that the job trains the same run on sampled layouts, or find one where it does not.

    No cluster is needed: ranks are CPU processes of this machine, and the job is shrunk to fit.

    Raises:
        ConfigError: The job cannot be made small enough, or has no layout to draw.
        WorkerError: The run on one rank failed.
    """
    from raymega.verify.run import Options, Watcher, verify_job

    return verify_job(job, options or Options(), watcher or Watcher())


def evaluate(
    uri: str,
    task: str,
    data: Path | str | None,
    *,
    options: EvalOptions | None = None,
    address: str = "auto",
    on_rows: OnRows | None = None,
) -> EvalReport:
    """Evaluate the newest checkpoint that ``uri`` names on a task, on any grid.

    Args:
        uri: URI of a run's folder, of one of its checkpoints or of a manifest.
        task: Name of a task: ``wikitext``, ``lambada``, ``race`` or ``perplexity``; or a YAML file of lm-eval.
        data: File of the task; None for the dataset that a YAML file names.
        options: Grid and lengths; None is one rank and the run's own.
        address: ``auto`` joins a running Ray or starts a local one; ``local``; ``HOST:PORT``.
        on_rows: Function that is told how many rows of tokens are done, and of how many.

    Raises:
        ConfigError: The checkpoint, task, file or grid is wrong; nothing was started.
        WorkerError: A worker failed.
        CapacityError: The cluster has no room for the grid.
    """
    from raymega.evaluate.run import evaluate_each

    (report,) = evaluate_each([uri], task, data, options=options, address=address, on_rows=on_rows)
    return report


def open_checkpoint(uri: str) -> Checkpoint:
    """Open the newest checkpoint that ``uri`` names, whole or not.

    Raises:
        ConfigError: The URI names no checkpoint.
        CheckpointError: The manifest cannot be read.
    """
    from raymega.checkpoint.tools import inspection

    return inspection.open_checkpoint(uri)


def report(run: str) -> str:
    """Return a run's page as HTML, from the records on this machine.

    Args:
        run: Name of a run below the default root, its folder, its URI, or its metrics.jsonl.

    Raises:
        ConfigError: No run's records are there.
    """
    from raymega.report.find import find_run
    from raymega.report.page import run_page

    return run_page(find_run(run), now=datetime.now(UTC), levels_of=_known_references)


def _known_references(job: Job) -> dict[str, float]:
    """Return the same lines where this machine has the run's data; none where it has not."""
    from raymega.launch import loss_references

    try:
        return loss_references(job)
    except RaymegaError:
        return {}
