"""Launch of a run's driver: its lease, Ray, sinks, worker group and controller.

`raymega.api.train` is the function that users call. What loads Ray is imported after the workers' process has
begun to load torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raymega.config.data import is_computed
from raymega.config.schema import Job
from raymega.data.megatron import is_megatron
from raymega.data.samples import known_datasets
from raymega.data.streaming.remote_dataset import meta_at
from raymega.data.tokenizer_files import keep_tokenizer
from raymega.events import RunFinished
from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.core.worker_group_api import TRAIN_ENTRY, WorkerGroup
from raymega.orchestrate.driver.signals import stop_on_signals
from raymega.orchestrate.run_store.finished_run import finished_run, tell
from raymega.orchestrate.run_store.journal import open_record
from raymega.orchestrate.run_store.lease import Lease, hold_lease
from raymega.orchestrate.run_store.lease_holder import this_process
from raymega.orchestrate.workers.fork_server import ForkServer
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.planner.search.selection import Choice
from raymega.session import Session, close_session, open_session
from raymega.storage.registry import driver_folder, open_store
from raymega.storage.retry import RetryingStore
from raymega.storage.store import Store
from raymega.tracking.sink import Sink

if TYPE_CHECKING:
    from raymega.evaluate.training_tasks import TrainingTasks

TASKS_ENTRY = "raymega.evaluate.training_entry"
LAYOUT_FILE = "layout.json"


def run_driver(
    job: Job, *, address: str, sinks: Sequence[Sink], choice: Choice | None, entry: str
) -> RunFinished:
    """Run the driver until the run ends; see :func:`raymega.api.train`."""
    from raymega.evaluate.tasks_beside import open_run_tasks

    plan, clock = make_plan(job), SystemClock()
    tasks = open_run_tasks(job)
    if tasks is not None and job.run.eval_tasks_on == "grid" and entry == TRAIN_ENTRY:
        entry = TASKS_ENTRY
    store = RetryingStore(open_store(job.run_uri))
    # refuses another model, and answers for a run without work, before Ray starts
    record = open_record(store, job, now=clock.timestamp())
    if (done := finished_run(store, record)) is not None:
        return tell(done, sinks)
    plan = replace(plan, datasets=known_datasets(job))
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
    job, folder = plan.job, local_folder(plan.job)
    is_on_grid = job.run.eval_tasks_on == "grid"
    with closing(ForkServer(entry, log_dir=folder / "logs")) as forks:
        session = open_session(address, py_executable=forks.py_executable)
        # after the fork server's start, which loads meanwhile
        from raymega.evaluate.tasks_beside import tasks_beside
        from raymega.orchestrate.driver.controller import Controller
        from raymega.orchestrate.driver.run_context import RunContext
        from raymega.tracking.run_sinks import run_sinks

        try:
            with (
                run_sinks(
                    job,
                    folder,
                    more=sinks,
                    references=loss_references(job),
                    files=_keep_choice(choice, folder),
                    first=tasks_beside(job, tasks) if tasks and not is_on_grid else None,
                ) as sink,
                # one thread, for commits that must not block the controller's loop
                ThreadPoolExecutor(max_workers=1) as executor,
            ):
                controller = Controller(
                    RunContext(
                        plan,
                        lease=lease,
                        group=_worker_group(plan, lease.store, session, entry, forks),
                        sink=sink,
                        clock=SystemClock(),
                        executor=executor,
                        tasks=tasks if is_on_grid else None,
                    )
                )
                with stop_on_signals(controller.request_stop):
                    return controller.run()
        finally:
            close_session()


def _worker_group(
    plan: RunPlan, store: Store, session: Session, entry: str, forks: ForkServer
) -> WorkerGroup:
    """Return the worker group that ``cluster.host`` selects: on Ray, or inside Ray Train."""
    from raymega.orchestrate.workers.preflight import Preflight
    from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup
    from raymega.orchestrate.workers.snapshot_holders import SnapshotServers

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
        # a private Ray starts all its workers by the fork server
        py_executable=None if session.is_private else forks.py_executable,
        preflight=Preflight(
            store=store,
            data_paths=job.dataset_paths,
            driver_node=session.node_id,
            modules=job.plugins.modules,
        ),
    )


def local_folder(job: Job) -> Path:
    """Return the driver's folder for logs, metrics.jsonl and pictures; see ``driver_folder``."""
    return driver_folder(job.run_uri)


def _keep_choice(choice: Choice | None, folder: Path) -> dict[Path, str]:
    """Write the planner's choice and its reasons to a file of the run; return {path: title}."""
    if choice is None:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"set": choice.overrides, "reasons": choice.reasons}
    path = folder / LAYOUT_FILE
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return {path: "Layout that the planner chose"}


def loss_references(job: Job) -> dict[str, float]:
    """Return horizontal lines of the loss curve, by label."""
    # A blend's validation text has no entropy of its own.
    if job.data.sources or job.data.validation:
        return {}
    if is_computed(job.data.path) or is_megatron(job.data.path):
        return {}
    meta = meta_at(job.data.path)
    return {"unigram entropy of the validation text": meta.valid_entropy}
