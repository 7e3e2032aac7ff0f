"""The worker group inside a ray.train.TorchTrainer: the same entry, on a grid that stays.

Ray Train starts the workers, notices their end and puts the run into its dashboard's tab; ranks,
messages and commits are raymega's as ever. A loss costs all processes, for Train ends them together:
no survivors, no spares, no snapshots, no smaller grid. Each attempt is a trainer of its own, without
retries, so that the driver alone decides.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from threading import Thread
from typing import Any, cast

import ray
from ray.actor import ActorHandle

from raymega.errors import CapacityError, Fault, InternalError
from raymega.messages import Replicas, Report, Requests, WorkerDied
from raymega.orchestrate.cluster.node_inventory import (
    Device,
    find_device,
    list_nodes,
    worker_resources,
)
from raymega.orchestrate.core.rank_placement import (
    WorkerLocation,
    assign_ranks,
    block_size,
    place_ranks,
)
from raymega.orchestrate.core.worker_group_api import (
    AttemptSpec,
    NodeDrain,
    NoSnapshots,
    SnapshotManager,
    WorkerStatus,
)
from raymega.orchestrate.ray_train.mailbox import MAX_CONCURRENCY, RemoteWorker, WorkerRendezvous
from raymega.orchestrate.ray_train.worker import run_worker
from raymega.orchestrate.workers.ray_worker_group import TRAIN_ENTRY
from raymega.plan.run_plan import RunPlan

log = logging.getLogger(__name__)

ANSWER_MARGIN_S = 10.0
END_PATIENCE_S = 30.0
"""For a trainer whose workers were told to let go; Train's own shutdown takes some seconds."""
MAX_CAUSE_LENGTH = 300


class RayTrainGroup:
    """The WorkerGroup protocol over TorchTrainer; see worker_group_api for each verb's timing."""

    def __init__(
        self, plan: RunPlan, *, folder: Path, can_grow: bool, entry: str = TRAIN_ENTRY
    ) -> None:
        """Starts nothing.

        Args:
            plan: Whose grid and cluster section say what a worker needs.
            folder: Where Train keeps its own records.
            can_grow: Nodes may still join, so that lack of room is a reason to wait.
            entry: Module that a worker runs; see worker_actor.EntryModule.
        """
        self._plan, self._folder, self._can_grow, self._entry = plan, folder, can_grow, entry
        self._block = block_size(plan.grid, plan.job.parallel)
        self._spec: AttemptSpec | None = None
        self._mailbox: ActorHandle[Any] | None = None  # made at run time, without a static type
        self._thread = Thread()
        self._members: dict[int, WorkerLocation] = {}
        self._end: str | None = None
        self._device: Device = "cpu"

    @property
    def snapshot_manager(self) -> SnapshotManager:
        """See WorkerGroup."""
        return NoSnapshots()

    def use(self, plan: RunPlan) -> None:
        """See WorkerGroup; here the grid stays.

        Raises:
            InternalError: It was to change.
        """
        raise InternalError(_fixed_fault(plan.grid.describe(), self._plan.grid.describe()))

    def ready(self) -> tuple[WorkerLocation, ...]:
        """See WorkerGroup; no process waits without a rank."""
        return ()

    def is_loading(self) -> bool:
        """See WorkerGroup; the trainer starts all at once."""
        return False

    def drain(self) -> NodeDrain | None:
        """See WorkerGroup; a node that is taken away is lost when it goes."""
        return None

    def reserve(self, timeout_s: float) -> Fault | None:  # noqa: ARG002  # looking takes no time
        """See WorkerGroup; the trainer itself waits until the room is free."""
        section = self._plan.job.cluster
        try:
            self._device = find_device(section)
            place_ranks(list_nodes(section), self._plan.grid, block=self._block)
        except CapacityError as error:
            if not self._can_grow:
                raise
            fault = error.faults[0]
            return fault if isinstance(fault, Fault) else None
        return None

    def start(self, spec: AttemptSpec) -> None:
        """See WorkerGroup."""
        self._spec, self._members, self._end = spec, {}, None
        options = {"num_cpus": 0, "max_concurrency": MAX_CONCURRENCY}
        actor = ray.remote(WorkerRendezvous).options(**options).remote()
        self._mailbox = cast(ActorHandle[Any], actor)
        self._thread = Thread(target=self._fit, args=(self._mailbox, spec.attempt), daemon=True)
        self._thread.start()

    def members(self) -> Mapping[int, WorkerLocation]:
        """See WorkerGroup."""
        return dict(self._members)

    def poll(self, timeout_s: float) -> list[Report | WorkerStatus]:
        """See WorkerGroup."""
        if self._mailbox is None:
            return []
        is_over = not self._thread.is_alive()  # before the last reports are taken
        reports: list[Report | WorkerStatus] = self._ask(
            self._mailbox.take_reports.remote(timeout_s), timeout_s
        )
        if not self._members:
            self._assigned()
        if is_over and self._end is not None:
            cause, self._end = self._end, None
            reports.append(WorkerDied(rank=-1, cause=cause))
        return reports

    def request(self, requests: Requests) -> None:
        """See WorkerGroup."""
        if self._mailbox is not None:
            self._mailbox.wish.remote(requests)

    def probe(self, silent: Collection[int]) -> None:
        """See WorkerGroup; Train's workers are not asked, so only the upper bounds end a hang."""

    def release(self, *, keep_warm: bool) -> None:  # noqa: ARG002  # Train keeps no process
        """See WorkerGroup."""
        if self._mailbox is None:
            return
        self._ask(self._mailbox.close.remote(), 0.0)
        self._thread.join(END_PATIENCE_S)
        if self._thread.is_alive():
            log.warning("Ray Train has not ended its workers in %.0f s", END_PATIENCE_S)
        ray.kill(self._mailbox)
        self._mailbox, self._spec, self._members = None, None, {}

    def _fit(self, mailbox: ActorHandle[Any], attempt: int) -> None:
        """The trainer's life, in a thread of its own."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer  # loads torch, which the driver else does not need

        section, name = self._plan.job.cluster, self._plan.job.run.name
        trainer = TorchTrainer(
            run_worker,
            train_loop_config={"mailbox": mailbox, "entry": self._entry},
            scaling_config=ScalingConfig(
                num_workers=self._plan.grid.world_size,
                use_gpu=self._device == "cuda",
                resources_per_worker=worker_resources(self._device, section.cpus_per_worker),
            ),
            run_config=RunConfig(
                name=f"{name}-a{attempt}",
                storage_path=str(self._folder),
                failure_config=FailureConfig(max_failures=0),
            ),
        )
        try:
            trainer.fit()
        except Exception as error:  # noqa: BLE001 - the thread's edge: it becomes a report
            self._end = " ".join(str(error).split())[:MAX_CAUSE_LENGTH]

    def _assigned(self) -> None:
        """Ranks by where the workers say that they live, never by Train's own order."""
        assert self._mailbox is not None and self._spec is not None, "an attempt has begun"
        remote_workers: dict[int, RemoteWorker] = self._ask(
            self._mailbox.remote_workers.remote(), 0.0
        )
        grid, spec = self._plan.grid, self._spec
        if len(remote_workers) < grid.world_size:
            return
        indices = sorted(remote_workers)
        locations = [remote_workers[index].location for index in indices]
        try:
            assigned_ranks = assign_ranks(locations, grid, block=self._block)
        except InternalError as error:
            raise CapacityError(_parted_fault(str(error))) from error
        host = next(
            i for i, assigned in zip(indices, assigned_ranks, strict=True) if assigned.rank == 0
        )
        starts = {
            index: spec.start_message(
                assigned,
                rendezvous=remote_workers[host].rendezvous,
                device=self._device,
                replicas=Replicas(),
            )
            for index, assigned in zip(indices, assigned_ranks, strict=True)
        }
        self._members = {s.rank: p for s, p in zip(assigned_ranks, locations, strict=True)}
        self._mailbox.send.remote(starts)

    def _ask(self, ref: ray.ObjectRef[Any], timeout_s: float) -> Any:
        return ray.get(ref, timeout=timeout_s + ANSWER_MARGIN_S)


def _fixed_fault(asked: str, has: str) -> Fault:
    return Fault(
        fact=f"grid {asked} was asked of a host with grid {has}",
        rule="under cluster.host=ray_train the grid stays",
        remedy="set cluster.host=ray",
    )


def _parted_fault(cause: str) -> Fault:
    return Fault(
        fact=f"Ray Train has parted a tp group ({cause})",
        rule="a tp group may not span nodes, and Train places workers one by one",
        remedy="set cluster.host=ray, which reserves each tp group as one bundle",
    )
