"""Runs an entry module once in a plan's workers, outside a training run: no lease, no retry, no checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raymega.errors import Fault, one_line
from raymega.messages import Report, WorkerDied, WorkerFailed, WorkerFinished
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.worker_group_api import AttemptSpec, WorkerStatus
from raymega.plan.run_plan import RunPlan

POLL_S = 1.0
MAX_CAUSE_LENGTH = 300
"""Characters of an error that a message shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryRun:
    """Outcome of an entry module's run.

    Attributes:
        locations: Locations of the workers, by rank.
        fault: Reason why not every rank has finished; None if all have.
        exit_code: Exit code of the error behind ``fault``; 1 where it has none.
    """

    locations: Mapping[int, WorkerLocation]
    fault: Fault | None
    exit_code: int = 1


def run_entry(
    plan: RunPlan,
    spec: AttemptSpec,
    entry: str,
    *,
    log_dir: Path,
    on_report: Callable[[Report | WorkerStatus], None],
) -> EntryRun:
    """Run ``entry`` once in ``plan``'s workers; see :class:`EntryWorkers`."""
    workers = EntryWorkers(plan, entry, log_dir=log_dir)
    try:
        return workers.run(spec, on_report=on_report)
    finally:
        workers.close()


class EntryWorkers:
    """Workers that run an entry module once or several times; used from one thread.

    Between two runs they keep their slots, and processes that have loaded.
    """

    def __init__(self, plan: RunPlan, entry: str, *, log_dir: Path) -> None:
        """Prepare; nothing is started.

        Args:
            plan: Plan whose grid and resources the workers have.
            entry: Module that they run.
            log_dir: Folder of the workers' logs, on each node.
        """
        # here: Ray takes 0.7 s to load, and whoever scores without workers loads this module too
        from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup

        self._plan, self._log_dir = plan, log_dir
        self._group = RayWorkerGroup(plan, log_dir=log_dir, can_grow=False, entry=entry)

    def run(
        self, spec: AttemptSpec, *, on_report: Callable[[Report | WorkerStatus], None]
    ) -> EntryRun:
        """Run the module until all workers have finished, one has failed, or none reports.

        Args:
            spec: Start message of the workers; of several runs each has a higher ``attempt``.
            on_report: Function that receives every report, in order of arrival.

        Raises:
            CapacityError: The cluster has no room for the workers.
        """
        group, limit_s = self._group, self._plan.job.elastic.start_timeout_s
        # wait for slots
        deadline_s = time.monotonic() + limit_s
        while (lacking := group.reserve(POLL_S)) is not None:
            if time.monotonic() > deadline_s:
                return EntryRun(locations={}, fault=lacking)
        # run: silence of all ranks ends it, as does the failure of one
        group.start(spec)
        try:
            return self._until_finished(limit_s, on_report)
        finally:
            group.release(keep_warm=True)

    def _until_finished(
        self, limit_s: float, on_report: Callable[[Report | WorkerStatus], None]
    ) -> EntryRun:
        group, log_dir = self._group, self._log_dir
        num_finished, heard_s = 0, time.monotonic()
        while num_finished < self._plan.grid.world_size:
            if time.monotonic() > heard_s + limit_s:
                return EntryRun(locations=group.members(), fault=_silent(limit_s, log_dir))
            for report in group.poll(POLL_S):
                heard_s = time.monotonic()
                on_report(report)
                num_finished += isinstance(report, WorkerFinished)
                if isinstance(report, WorkerFailed | WorkerDied):
                    code = report.exit_code if isinstance(report, WorkerFailed) else 1
                    fault = _broken(report, log_dir)
                    return EntryRun(locations=group.members(), fault=fault, exit_code=code)
        return EntryRun(locations=group.members(), fault=None)

    def close(self) -> None:
        """Release the slots and end the processes."""
        self._group.release(keep_warm=False)


def _silent(limit_s: float, log_dir: Path) -> Fault:
    return Fault(
        fact=f"no rank has reported anything for {limit_s:g} s",
        rule=f"elastic.start_timeout_s={limit_s:g} s pass at most between two reports",
        remedy=f"look at {log_dir} on the nodes; a firewall between them is a usual cause",
    )


def _broken(report: WorkerFailed | WorkerDied, log_dir: Path) -> Fault:
    cause = report.message if isinstance(report, WorkerFailed) else report.cause
    return Fault(
        fact=f"rank {report.rank} failed: {one_line(cause, MAX_CAUSE_LENGTH)}",
        rule="every rank must start, meet the others and finish",
        remedy=f"look at {log_dir} on its node; check NCCL_SOCKET_IFNAME and the firewall",
    )
