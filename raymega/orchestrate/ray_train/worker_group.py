"""The worker group inside a ray.train.TorchTrainer: the same entry module, on a fixed grid.

Ray Train starts the workers, notices their end and shows the run in its dashboard; ranks, messages and
commits are raymega's. Train ends all processes when one is lost, so there are no survivors, spares, snapshots
or smaller grids. Each attempt is a new trainer without retries, so that only the driver decides.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymega.errors import CapacityError, Fault, InternalError, one_line
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
    TRAIN_ENTRY,
    AttemptSpec,
    NodeDrain,
    NoSnapshots,
    SnapshotManager,
    WorkerStatus,
)
from raymega.orchestrate.ray_train.mailbox import DRIVER_CALLS, RemoteWorker, WorkerRendezvous
from raymega.orchestrate.ray_train.worker import run_worker
from raymega.plan.run_plan import RunPlan

log = logging.getLogger(__name__)

ANSWER_MARGIN_S = 10.0
END_PATIENCE_S = 30.0
"""Longest wait for a trainer to end after its workers were told to, in seconds."""
MAX_CAUSE_LENGTH = 300


class RayTrainGroup:
    """The WorkerGroup protocol over TorchTrainer; see ``core/worker_group_api.py`` for what may block."""

    def __init__(
        self, plan: RunPlan, *, folder: Path, can_grow: bool, entry: str = TRAIN_ENTRY
    ) -> None:
        """Prepare the group; nothing is started.

        Args:
            plan: Plan of the run; its grid and cluster section determine the workers' resources.
            folder: Folder for Train's own records (``storage_path``).
            can_grow: Whether nodes may still join; then the group waits for room instead of failing.
            entry: Name of the module that a worker runs; see worker_actor.EntryModule.
        """
        self._plan, self._folder, self._can_grow, self._entry = plan, folder, can_grow, entry
        self._block = block_size(plan.grid, plan.job.parallel)
        self._spec: AttemptSpec | None = None
        self._mailbox: ActorHandle[Any] | None = None  # made at run time, without a static type
        self._thread = Thread()
        self._members: dict[int, WorkerLocation] = {}
        self._end: str | None = None  # the trainer's error, until poll has reported it
        self._is_lost = False  # the mailbox has failed, which poll has reported
        self._device: Device = "cpu"

    @property
    def snapshot_manager(self) -> SnapshotManager:
        """See WorkerGroup."""
        return NoSnapshots()

    def use(self, plan: RunPlan, homes: Mapping[int, int] | None = None) -> None:  # noqa: ARG002
        """Refuse a change of the grid, which is fixed here.

        Raises:
            InternalError: The method was called.
        """
        raise InternalError(
            fact=f"grid {plan.grid.describe()} was asked of a host with grid {self._plan.grid.describe()}",
            rule="under cluster.host=ray_train the grid stays",
            remedy="set cluster.host=ray",
        )

    def held(self) -> Mapping[int, int]:
        """Return nothing: a process ends with its attempt."""
        return {}

    def ready(self) -> tuple[WorkerLocation, ...]:
        """Return no processes: none exists outside an attempt."""
        return ()

    def is_loading(self) -> bool:
        """Return False: the trainer starts all processes at once, with the attempt."""
        return False

    def drain(self) -> NodeDrain | None:
        """Return None: drains are not watched, so a node that is taken away counts as lost."""
        return None

    def reserve(self, timeout_s: float) -> Fault | None:  # noqa: ARG002  # looking takes no time
        """Check that the cluster would have room if idle; the trainer waits until the room is free."""
        section = self._plan.job.cluster
        try:
            self._device = find_device(section)
            place_ranks(list_nodes(section), self._plan.grid, block=self._block)
        except CapacityError as error:
            if not self._can_grow:
                raise
            return error.faults[0]
        return None

    def start(self, spec: AttemptSpec) -> None:
        """See WorkerGroup."""
        self._spec, self._members, self._end, self._is_lost = spec, {}, None, False
        # the mailbox for this attempt, which no other node's loss ends, and the trainer in a thread, as fit() blocks
        here = ray.get_runtime_context().get_node_id()
        options = {
            "num_cpus": 0,
            "max_concurrency": self._plan.grid.world_size + DRIVER_CALLS,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=here, soft=False),
        }
        actor = ray.remote(WorkerRendezvous).options(**options).remote()
        self._mailbox = cast(ActorHandle[Any], actor)
        self._thread = Thread(target=self._fit, args=(self._mailbox, spec.attempt), daemon=True)
        self._thread.start()

    def members(self) -> Mapping[int, WorkerLocation]:
        """See WorkerGroup."""
        return dict(self._members)

    def poll(self, timeout_s: float) -> list[Report | WorkerStatus]:
        """See WorkerGroup."""
        if self._mailbox is None or self._is_lost:
            return []
        # read before the reports, so that the workers' last reports come before the trainer's end
        is_over = not self._thread.is_alive()
        reports: list[Report | WorkerStatus] = []
        try:
            reports += self._ask(self._mailbox.take_reports.remote(timeout_s), timeout_s)
            # assign ranks once all workers have registered
            if not self._members:
                self._assigned()
        except RayError as error:
            why, self._is_lost = one_line(error, MAX_CAUSE_LENGTH), True
            reports.append(WorkerDied(rank=-1, cause=f"the mailbox does not answer ({why})"))
        if is_over and self._end is not None:
            cause, self._end = self._end, None
            reports.append(WorkerDied(rank=-1, cause=cause))
        return reports

    def request(self, requests: Requests) -> None:
        """See WorkerGroup."""
        if self._mailbox is not None:
            self._mailbox.wish.remote(requests)

    def probe(self, silent: Collection[int]) -> None:
        """Do nothing: Train's workers cannot be probed, so only the upper bounds detect a hang."""

    def release(self, *, keep_warm: bool) -> None:  # noqa: ARG002  # Train keeps no process
        """See WorkerGroup."""
        if self._mailbox is None:
            return
        # the closed mailbox makes workers abort, which ends the trainer
        with suppress(RayError):  # without it they abort too
            self._ask(self._mailbox.close.remote(), 0.0)
        self._thread.join(END_PATIENCE_S)
        if self._thread.is_alive():
            log.warning("Ray Train has not ended its workers in %.0f s", END_PATIENCE_S)
        ray.kill(self._mailbox)
        self._mailbox, self._spec, self._members = None, None, {}

    def _fit(self, mailbox: ActorHandle[Any], attempt: int) -> None:
        """Run a trainer for one attempt, in a thread of its own, and keep its error for ``poll``."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import (
            TorchTrainer,
        )  # here, as it imports torch, which the driver avoids

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
            self._end = one_line(error, MAX_CAUSE_LENGTH)

    def _assigned(self) -> None:
        """Assign ranks by the workers' locations, not by Train's order, and send the start messages."""
        assert self._mailbox is not None and self._spec is not None, "an attempt has begun"
        remote_workers: dict[int, RemoteWorker] = self._ask(
            self._mailbox.remote_workers.remote(), 0.0
        )
        grid, spec = self._plan.grid, self._spec
        if len(remote_workers) < grid.world_size:
            return
        # ranks, by node and GPU
        indices = sorted(remote_workers)
        locations = [remote_workers[index].location for index in indices]
        try:
            assigned_ranks = assign_ranks(locations, grid, block=self._block)
        except InternalError as error:
            raise CapacityError(
                fact=f"Ray Train has parted a tp group ({error!s})",
                rule="a tp group may not span nodes, and Train places workers one by one",
                remedy="set cluster.host=ray, which reserves each tp group as one bundle",
            ) from error
        # the worker of rank 0 hosts the rendezvous
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
