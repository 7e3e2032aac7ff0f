"""Measurements by a job's workers: an entry runs in each, and its reports come back.

``checks.py`` judges bandwidths, ``calibrate.py`` fits an accelerator.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from raymega.errors import Fault
from raymega.messages import Entered, Report
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.worker_group_api import AttemptSpec, WorkerStatus
from raymega.orchestrate.workers.single_run import run_entry
from raymega.plan.run_plan import RunPlan


def measure(
    plan: RunPlan, entry: str
) -> tuple[list[Entered], Mapping[int, WorkerLocation], Fault | None]:
    """Run ``entry`` in ``plan``'s workers; return timings, ranks' locations, and why timings are missing.

    Raises:
        CapacityError: The cluster has no room for the workers.
    """
    timings: list[Entered] = []

    def keep(report: Report | WorkerStatus) -> None:
        if isinstance(report, Entered):
            timings.append(report)

    spec = AttemptSpec(plan_json=plan.to_json(), run_uri="", attempt=0, restore="")
    log_dir = Path(tempfile.gettempdir()) / "raymega-doctor"
    done = run_entry(plan, spec, entry, log_dir=log_dir, on_report=keep)
    return timings, done.locations, done.fault
