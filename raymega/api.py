"""Functions behind the commands: load a job, plan it, train it, verify it.

They connect the other packages and hold no logic of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from raymega.checkpoint.format.manifest import list_manifests
from raymega.checkpoint.load.init_from import resume_faults, start_faults
from raymega.checkpoint.tools.inspection import open_checkpoint as open_checkpoint
from raymega.config.data import is_synthetic
from raymega.config.fields import Section
from raymega.config.load import parse_job
from raymega.config.schema import CheckpointSection, Job, ModelSection, ScheduleSection
from raymega.data.blends.epochs import budget_steps
from raymega.data.checks import training_faults
from raymega.data.megatron import is_megatron
from raymega.data.remote_dataset import meta_at
from raymega.data.samples import first_rows
from raymega.data.tokenizer_files import keep_tokenizer
from raymega.errors import ConfigError, DataError, Fault, raise_faults
from raymega.evaluate.run import EvalOptions, EvalReport, OnRows
from raymega.evaluate.run import evaluate_each as evaluate_each
from raymega.evaluate.tasks_beside import open_run_tasks, tasks_beside
from raymega.evaluate.training_tasks import TrainingTasks
from raymega.events import RunFinished
from raymega.orchestrate.cluster.node_inventory import list_nodes, node_memory
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.core.rank_placement import block_size, place_ranks
from raymega.orchestrate.core.worker_group_api import WorkerGroup
from raymega.orchestrate.diagnostics.calibrate import calibrate_cluster
from raymega.orchestrate.driver.controller import Controller
from raymega.orchestrate.driver.run_context import RunContext
from raymega.orchestrate.driver.signals import stop_on_signals
from raymega.orchestrate.jobs.submission import credential_faults, relative_path_faults
from raymega.orchestrate.run_store.journal import open_record
from raymega.orchestrate.run_store.lease import Lease, hold_lease
from raymega.orchestrate.run_store.lease_holder import this_process
from raymega.orchestrate.workers.preflight import Preflight
from raymega.orchestrate.workers.ray_worker_group import TRAIN_ENTRY, RayWorkerGroup
from raymega.orchestrate.workers.snapshot_holders import SnapshotServers
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.packing.step_estimate import PackedStep, packed_step
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.plan.snapshot_replicas import memory_faults
from raymega.plan.validation.registry import job_faults
from raymega.planner.calibration.fit import accelerator_yaml
from raymega.planner.search.auto_parallel import choose_layout, planned_for
from raymega.planner.search.selection import Choice
from raymega.session import Session, close_session, open_session
from raymega.storage.registry import (
    apart_faults,
    driver_folder,
    folder_faults,
    open_store,
    store_faults,
)
from raymega.storage.retry import RetryingStore
from raymega.storage.store import Store
from raymega.tracking.run_sinks import run_sinks
from raymega.tracking.sink import Sink
from raymega.verify.run import Options, Report, Watcher, verify_job

LAYOUT_FILE = "layout.json"
TASKS_ENTRY = "raymega.evaluate.training_entry"
T = TypeVar("T", bound=Section)


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
) -> tuple[Job, Choice | None]:
    """Return the job as :func:`load_job` does, and the planner's choice of a layout if it made one."""
    parsed = parse_job(path, overrides)
    # A length in tokens or epochs becomes one in steps, on which schedules and plans depend.
    steps, faults = budget_steps(parsed.values)
    parsed = parsed.with_steps(steps, faults)
    # The planner fills in the layout before the rules between fields are checked.
    choice = choose_layout(parsed)
    if choice is not None:
        parsed = parsed.with_overrides(choice.overrides)
    faults = [*parsed.faults, *job_faults(parsed.values), *credential_faults(parsed.values)]
    if is_in_ray_job:
        faults += relative_path_faults(Path(path), overrides)
    if is_for_training:
        faults += _outside_faults(parsed.values)
    raise_faults(ConfigError, faults)
    job = parsed.job()
    if is_for_training:
        open_run_tasks(job)
    return job, choice


def plan(job: Job) -> RunPlan:
    """Return the run plan: everything that follows from the job before a process starts."""
    return make_plan(job)


def look_at_packing(plan: RunPlan) -> tuple[PackedStep | None, str]:
    """Return the cost of the run's first step of packed documents, or why it is unknown here."""
    try:
        rows = first_rows(plan.job)
    except (ConfigError, DataError) as error:
        return None, str(error.faults[0])
    if not rows:
        path, field = next(iter(plan.job.data.datasets.items()))
        return None, f"{field}={path!r} is not on this machine"
    return packed_step(plan, rows), ""


def local_folder(job: Job) -> Path:
    """Return the driver's folder for logs, metrics.jsonl and pictures; see ``driver_folder``."""
    return driver_folder(job.run_uri)


def train(
    job: Job,
    *,
    address: str = "auto",
    sinks: Sequence[Sink] = (),
    choice: Choice | None = None,
    entry: str = TRAIN_ENTRY,
) -> RunFinished:
    """Run the driver until the run ends; a run name that exists continues that run.

    Args:
        job: Job of :func:`load_job`.
        address: ``auto`` joins a running Ray or starts a local one; ``local``; ``HOST:PORT``.
        sinks: Sinks in addition to metrics.jsonl, MLflow and the pictures; closed at the end.
        choice: Choice of the planner with its reasons, which is saved with the run; None without one.
        entry: Module that workers run.

    Raises:
        ConfigError: The run exists with another model, seed or data, its store cannot hold a lease, or a
            node failed its checks.
        LeaseError: Another driver holds the run, or has taken it from this one.
        CapacityError: The cluster has no room.
        PreemptedError: The run was asked to stop, and saved.
        WorkerError: The retry budget is spent.
        RaymegaError: Another error ended the run; its class has the exit code.
    """
    plan, clock = make_plan(job), SystemClock()
    tasks = open_run_tasks(job)
    if tasks is not None and job.run.eval_tasks_on == "grid" and entry == TRAIN_ENTRY:
        entry = TASKS_ENTRY
    store = RetryingStore(open_store(job.run_uri))
    open_record(store, job, now=clock.timestamp())  # refuses another model before Ray starts
    me, duration_s = this_process(), job.elastic.lease_s
    with hold_lease(Lease(store, holder=me, duration_s=duration_s, clock=clock)) as lease:
        keep_tokenizer(store, next(iter(job.data.datasets)))
        return _drive(
            plan, lease, address=address, sinks=sinks, choice=choice, entry=entry, tasks=tasks
        )


def _drive(  # noqa: PLR0913  # train is the one place that calls it
    plan: RunPlan,
    lease: Lease,
    *,
    address: str,
    sinks: Sequence[Sink],
    choice: Choice | None,
    entry: str,
    tasks: TrainingTasks | None,
) -> RunFinished:
    """Run the driver of a run whose lease this process holds."""
    job, clock, store = plan.job, SystemClock(), lease.store
    is_on_grid = job.run.eval_tasks_on == "grid"
    session = open_session(address)
    try:
        with (
            run_sinks(
                job,
                local_folder(job),
                more=sinks,
                references=_loss_references(job),
                files=_keep_choice(choice, local_folder(job)),
                first=tasks_beside(job, tasks) if tasks and not is_on_grid else None,
            ) as sink,
            # one thread, for commits that must not block the controller's loop
            ThreadPoolExecutor(max_workers=1) as executor,
        ):
            controller = Controller(
                RunContext(
                    plan,
                    lease=lease,
                    group=_worker_group(plan, store, session, entry),
                    sink=sink,
                    clock=clock,
                    executor=executor,
                    tasks=tasks if is_on_grid else None,
                )
            )
            with stop_on_signals(controller.request_stop):
                return controller.run()
    finally:
        close_session()


def _worker_group(plan: RunPlan, store: Store, session: Session, entry: str) -> WorkerGroup:
    """Return the worker group that ``cluster.host`` selects: on Ray, or inside Ray Train."""
    job, folder, can_grow = plan.job, local_folder(plan.job), not session.is_private
    if job.cluster.host == "ray_train":
        from raymega.orchestrate.ray_train.worker_group import (
            RayTrainGroup,  # Ray Train takes a second
        )

        return RayTrainGroup(plan, folder=folder / "ray_train", can_grow=can_grow, entry=entry)
    has_snapshots = job.elastic.snapshot_every > 0
    return RayWorkerGroup(
        plan,
        snapshot_servers=SnapshotServers(plan, clock=SystemClock()) if has_snapshots else None,
        log_dir=folder / "logs",
        can_grow=can_grow,
        entry=entry,
        preflight=Preflight(store=store, data_paths=job.dataset_paths, driver_node=session.node_id),
    )


def dry_run(job: Job, *, address: str = "auto") -> RunPlan:
    """Do everything that :func:`train` does before it starts a worker, with the same errors."""
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
    (report,) = evaluate_each([uri], task, data, options=options, address=address, on_rows=on_rows)
    return report


def _keep_choice(choice: Choice | None, folder: Path) -> dict[Path, str]:
    """Write the planner's choice and its reasons to a file of the run; return {path: title}."""
    if choice is None:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"set": choice.overrides, "reasons": choice.reasons}
    path = folder / LAYOUT_FILE
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return {path: "Layout that the planner chose"}


def _loss_references(job: Job) -> dict[str, float]:
    """Return horizontal lines of the loss curve, by label."""
    # A blend's validation text has no entropy of its own.
    if job.data.sources or job.data.validation:
        return {}
    if is_synthetic(job.data.path) or is_megatron(job.data.path):
        return {}
    meta = meta_at(job.data.path)
    return {"unigram entropy of the validation text": meta.valid_entropy}


def _outside_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults of data and store, as far as the job's fields parsed."""
    yield from training_faults(values)
    if values.get("checkpoint.local_uri", "none") != "none":
        yield from _near_faults(values["checkpoint.local_uri"], values.get("checkpoint.uri"))
    # store of the run
    if "checkpoint.uri" in values:
        run = f"/{values['run.name']}" if "run.name" in values else ""
        uri = values["checkpoint.uri"].rstrip("/") + run
        outside = store_faults(uri)
        yield from outside
        # A run with checkpoints of its own resumes from them, whatever checkpoint.init_from says.
        if not outside and list_manifests(open_store(uri)):
            model = _section(values, "model", ModelSection)
            schedule = _section(values, "schedule", ScheduleSection)
            if model and schedule:
                size, fp8 = schedule.micro_batch_size, values.get("precision.fp8", "none")
                yield from resume_faults(open_store(uri), model, micro_batch_size=size, fp8=fp8)
            return
    # checkpoint that a new run starts from
    if values.get("checkpoint.init_from", "none") != "none":
        model = _section(values, "model", ModelSection)
        checkpoint = _section(values, "checkpoint", CheckpointSection)
        if model and checkpoint:
            yield from start_faults(checkpoint, model)


def _near_faults(near: str, uri: str | None) -> list[Fault]:
    field = "checkpoint.local_uri"
    faults = folder_faults(near, field=field)
    if faults or uri is None:
        return faults
    return apart_faults(near, field=field, other=uri, other_field="checkpoint.uri")


def _section(values: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """Return the job's section, or None where one of its fields did not parse."""
    fields = {field: f"{name}.{field}" for field in kind.model_fields}
    if not values.keys() >= set(fields.values()):
        return None
    return kind.model_validate({field: values[path] for field, path in fields.items()})
