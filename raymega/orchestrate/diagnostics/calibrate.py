"""`raymega doctor --calibrate`: a job's workers measure the cluster, and an accelerator is fitted.

The workers run ``train/diagnostics/calibration.py``; ``planner/calibration/fit.py`` fits the measurements.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from raymega.errors import WorkerError
from raymega.messages import Entered
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.diagnostics.measurement import measure
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.calibration.fit import Measurement, fit_device

CALIBRATION_ENTRY = "raymega.train.diagnostics.calibration"


def calibrate_cluster(plan: RunPlan, base: Accelerator, *, name: str) -> Accelerator:
    """Return an accelerator fitted to what ``plan``'s workers measure on the cluster's devices and links.

    Args:
        plan: Plan of a run; its grid's workers measure, and its groups' transfers are timed.
        base: Nearest accelerator of the catalogue, which supplies the values that are not measured.
        name: Name of the new accelerator.

    Raises:
        WorkerError: A worker failed.
        CapacityError: The cluster has no room for the workers.
    """
    reports, homes, fault = measure(plan, CALIBRATION_ENTRY)
    if fault is not None:
        raise WorkerError(fault)
    return fit_device(base, list(measurements(reports, homes)), name=name)


def measurements(
    reports: Iterable[Entered], homes: Mapping[int, WorkerLocation]
) -> Iterable[Measurement]:
    """Yield the ranks' measurements, each group's all-reduce once, with the time of its slowest rank.

    To the sizes of an all-reduce are added the number of the group's ranks on one node, and of all workers on
    one node.
    """
    # by ranks of the group and bytes of the message
    transfers: dict[tuple[tuple[int, ...], float], Measurement] = {}
    for report in reports:
        told = json.loads(report.detail)
        measured = Measurement(**{**told["measured"], "sizes": tuple(told["measured"]["sizes"])})
        # kernels: one measurement a rank
        if measured.kind != "all_reduce":
            yield measured
            continue
        # transfers: every rank of the group reports the same one
        ranks = tuple(told["ranks"])
        num_bytes, size, *_ = measured.sizes
        sharing = _per_node(ranks, homes), _per_node(homes or ranks, homes)
        # the planner distinguishes links inside a node from those between nodes
        mine = replace(measured, sizes=(num_bytes, size, *map(float, sharing)))
        # the slowest rank's time is the group's
        known = transfers.get((ranks, num_bytes))
        if known is None or known.seconds < mine.seconds:
            transfers[ranks, num_bytes] = mine
    yield from transfers.values()


def _per_node(ranks: Iterable[int], homes: Mapping[int, WorkerLocation]) -> int:
    """Return the largest number of a group's ranks on one node; all of them if locations are unknown."""
    nodes: dict[str, int] = defaultdict(int)
    for rank in ranks:
        nodes[homes[rank].node_id if rank in homes else ""] += 1
    return max(nodes.values())
