"""`raymega doctor --calibrate`: a job's workers measure the cluster, and an accelerator comes of it.

What the workers time is train.diagnostics.calibration's, what follows planner.calibration.fit's.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from raymega.errors import Fault, WorkerError
from raymega.messages import Entered
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.diagnostics.checks import measure
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.run_plan import RunPlan
from raymega.planner.calibration.fit import Measurement, fit_device

CALIBRATION_ENTRY = "raymega.train.diagnostics.calibration"


def calibrate_cluster(plan: RunPlan, base: Accelerator, *, name: str) -> Accelerator:
    """What the cluster's devices and links reach, measured by ``plan``'s workers where it would run.

    Args:
        plan: Whose grid, and whose groups' transfers, are measured.
        base: The catalogue's nearest: what is not measured is that one's.
        name: Of the new accelerator.

    Raises:
        WorkerError: A worker failed.
        CapacityError: There is no room for the workers.
    """
    reports, homes, fault = measure(plan, CALIBRATION_ENTRY)
    if fault is not None:
        raise WorkerError(fault if isinstance(fault, Fault) else str(fault))
    return fit_device(base, list(measurements(reports, homes)), name=name)


def measurements(
    reports: Iterable[Entered], homes: Mapping[int, WorkerLocation]
) -> Iterable[Measurement]:
    """What ranks reported, each group's transfer once: as its slowest rank saw it.

    A transfer is given how many of the group's ranks share a node, and how many workers are there.
    """
    transfers: dict[tuple[tuple[int, ...], float], Measurement] = {}
    for report in reports:
        told = json.loads(report.detail)
        measured = Measurement(**{**told["measured"], "sizes": tuple(told["measured"]["sizes"])})
        if measured.kind != "all_reduce":
            yield measured
            continue
        ranks = tuple(told["ranks"])
        num_bytes, size, *_ = measured.sizes
        sharing = _per_node(ranks, homes), _per_node(homes or ranks, homes)
        mine = replace(measured, sizes=(num_bytes, size, *map(float, sharing)))
        known = transfers.get((ranks, num_bytes))
        if known is None or known.seconds < mine.seconds:
            transfers[ranks, num_bytes] = mine
    yield from transfers.values()


def _per_node(ranks: Iterable[int], homes: Mapping[int, WorkerLocation]) -> int:
    """The most ranks of a group on one node; all of them where homes are not known."""
    nodes: dict[str, int] = defaultdict(int)
    for rank in ranks:
        nodes[homes[rank].node_id if rank in homes else ""] += 1
    return max(nodes.values())
