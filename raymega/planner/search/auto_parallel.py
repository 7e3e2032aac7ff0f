"""`parallel: auto`: what a job file leaves open is chosen when the file is read.

It says what a file must state for that and what it holds; the choice itself is selection's.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """The layout of a job with ``parallel.layout=auto``; None for one that gives its own.

    Raises:
        ConfigError: The job has other faults, or does not say for how many workers or of which kind.
        PlanError: No layout is legal and fits.
    """
    values = parsed.values
    if values.get("parallel.layout") != "auto":
        return None
    # Rules between what will be chosen cannot be asked yet; the chosen layout keeps them all.
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
"""Fields that a choice would set, and that stay when the job sets them."""


def planned_for(values: Mapping[str, Any]) -> Accelerator:
    """What the job's workers have.

    Raises:
        ConfigError: A YAML file of it cannot be read.
        PlanError: The catalogue has no such name.
    """
    name = values["cluster.accelerator"]
    return find_accelerator("cpu" if name == BY_DEVICE else name, field="cluster.accelerator")


def auto_faults(values: Mapping[str, Any]) -> list[Fault]:
    """What a job with ``parallel.layout=auto`` must say and does not."""
    faults = []
    if values.get("cluster.num_workers") == "grid":
        faults.append(
            Fault(
                fact="parallel.layout=auto with cluster.num_workers=grid",
                rule="a layout is chosen for a number of workers, and the grid is what is to be chosen",
                remedy="set cluster.num_workers, such as 8",
            )
        )
    device = values.get("cluster.device")
    if values.get("cluster.accelerator") == BY_DEVICE and device not in (None, "cpu"):
        faults.append(
            Fault(
                fact=f"parallel.layout=auto with cluster.accelerator=device and cluster.device={device}",
                rule="times and memory are a device's, and what the cluster has is known only when it runs",
                remedy=f"set cluster.accelerator to one of {', '.join(CATALOGUE)} or to a YAML file, or "
                "cluster.device=cpu",
            )
        )
    return faults
