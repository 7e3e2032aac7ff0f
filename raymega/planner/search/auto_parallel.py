"""Choose the layout of a job with ``parallel: auto`` when its file is read.

The module checks what such a file must state, and keeps the fields that the file fixes.
``raymega.planner.search.selection`` makes the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raymega.config.load import ParsedJob
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.plan.hardware.catalog import CATALOGUE, Accelerator
from raymega.plan.hardware.catalog_file import find_accelerator
from raymega.plan.validation.registry import job_faults
from raymega.planner.search.candidates import CHOSEN
from raymega.planner.search.selection import Choice, best_grid

BY_DEVICE = "device"


def choose_layout(parsed: ParsedJob) -> Choice | None:
    """Return the layout of a job with ``parallel.layout=auto``, or None for any other job.

    Raises:
        ConfigError: The job has other faults, or does not state the number or the kind of its
            workers.
        PlanError: No layout is legal and fits into memory.
    """
    values = parsed.values
    if values.get("parallel.layout") != "auto":
        return None
    # Rules between fields that are still open cannot be checked; the chosen layout keeps them.
    known = {path: value for path, value in values.items() if path not in CHOSEN}
    faults = [*parsed.faults, *job_faults(known), *auto_faults(known)]
    raise_faults(ConfigError, faults)
    num_workers = values["cluster.num_workers"]
    fixed = parsed.stated.intersection(FIXABLE)
    return best_grid(parsed.job(), num_workers, planned_for(values), fixed=fixed)


FIXABLE = frozenset(
    (
        *CHOSEN, "parallel.first_stage_layers", "parallel.last_stage_layers",
        "parallel.is_embedding_a_layer", "parallel.is_loss_a_layer", "schedule.microbatch_group_size_per_vp_stage",
        "schedule.max_in_flight_microbatches", "memory.recompute_parts",
    )
)  # fmt: skip
"""Fields that a choice would set, but that keep their values when the job states them."""


def planned_for(values: Mapping[str, Any]) -> Accelerator:
    """Return the accelerator of the job's workers.

    Raises:
        ConfigError: The accelerator's YAML file cannot be read.
        PlanError: The catalogue has no accelerator of that name.
    """
    name = values["cluster.accelerator"]
    return find_accelerator("cpu" if name == BY_DEVICE else name, field="cluster.accelerator")


def auto_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Return the faults of a job with ``parallel.layout=auto`` that omits what a choice needs."""
    if values.get("cluster.num_workers") == "grid":
        yield Fault(
            fact="parallel.layout=auto with cluster.num_workers=grid",
            rule="a layout is chosen for a number of workers, and the grid is what is to be chosen",
            remedy="set cluster.num_workers, such as 8",
        )
    device = values.get("cluster.device")
    if values.get("cluster.accelerator") == BY_DEVICE and device not in (None, "cpu"):
        yield Fault(
            fact=f"parallel.layout=auto with cluster.accelerator=device and cluster.device={device}",
            rule="times and memory are a device's, and what the cluster has is known only when it runs",
            remedy=f"set cluster.accelerator to one of {', '.join(CATALOGUE)} or to a YAML file, or "
            "cluster.device=cpu",
        )
