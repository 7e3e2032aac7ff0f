"""Measurements by a job's workers: an entry runs in each, and its reports come back.

``checks.py`` judges bandwidths, ``calibrate.py`` fits an accelerator.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from raymega.errors import Fault, one_line
from raymega.messages import Entered, WorkerDied, WorkerFailed, WorkerFinished
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.worker_group_api import AttemptSpec
from raymega.orchestrate.workers.ray_worker_group import RayWorkerGroup
from raymega.plan.run_plan import RunPlan

MAX_CAUSE_LENGTH = 300


def measure(
    plan: RunPlan, entry: str
) -> tuple[list[Entered], Mapping[int, WorkerLocation], Fault | None]:
    """Run ``entry`` in ``plan``'s workers; return timings, ranks' locations, and why timings are missing.

    Raises:
        CapacityError: The cluster has no room for the workers.
    """
    log_dir = Path(tempfile.gettempdir()) / "raymega-doctor"
    group = RayWorkerGroup(plan, log_dir=log_dir, can_grow=False, entry=entry)
    try:
        timings, fault = _collect(group, plan)
        return timings, group.members(), fault
    finally:
        group.release(keep_warm=False)


def _collect(group: RayWorkerGroup, plan: RunPlan) -> tuple[list[Entered], Fault | None]:
    """Return the timings of all ranks, and a fault if some are missing."""
    limit_s = plan.job.elastic.start_timeout_s
    deadline_s = time.monotonic() + limit_s
    while (lacking := group.reserve(1.0)) is not None:  # wait for slots
        if time.monotonic() > deadline_s:
            return [], lacking
    group.start(AttemptSpec(plan_json=plan.to_json(), run_uri="", attempt=0, restore=""))
    timings: list[Entered] = []
    num_finished = 0
    while num_finished < plan.grid.world_size:  # until a rank fails or all are done
        if time.monotonic() > deadline_s:
            return timings, Fault(
                fact="not every rank has measured its groups",
                rule=f"they have elastic.start_timeout_s={limit_s:g} s",
                remedy="look at /tmp/raymega-doctor on the nodes; a firewall between them is a "
                "usual cause",
            )
        for report in group.poll(1.0):
            if isinstance(report, Entered):
                timings.append(report)
            elif isinstance(report, WorkerFinished):
                num_finished += 1
            elif isinstance(report, WorkerFailed | WorkerDied):
                cause = report.message if isinstance(report, WorkerFailed) else report.cause
                return timings, Fault(
                    fact=f"rank {report.rank} failed: {one_line(cause, MAX_CAUSE_LENGTH)}",
                    rule="the ranks must be able to meet and to send",
                    remedy="look at /tmp/raymega-doctor on its node; check NCCL_SOCKET_IFNAME and "
                    "the firewall",
                )
    return timings, None
