"""Check the rules of the elastic section, some of which read other sections."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from raymega.errors import Fault
from raymega.plan.validation.rule import Rule, reads


@reads("cluster.host, elastic.spares snapshot_every")
def host_faults(host: str, spares: int, snapshot_every: int) -> Iterator[Fault]:
    """Check that the host keeps processes, where spares or snapshots need them."""
    asked = {"elastic.spares": spares, "elastic.snapshot_every": snapshot_every}
    for field, value in asked.items():
        if host == "ray_train" and value > 0:
            yield Fault(
                fact=f"cluster.host={host} with {field}={value}",
                rule="Ray Train ends all workers together, and with them what they hold in memory",
                remedy=f"set {field}=0, or cluster.host=ray",
            )


@reads("elastic.spares, parallel.tp is_tp_across_nodes_allowed")
def spares_faults(spares: int, tp: int, is_tp_across_nodes_allowed: bool) -> Iterator[Fault]:
    """Check that spares replace whole tp groups, unless such a group may span nodes."""
    if spares % tp and not is_tp_across_nodes_allowed:
        yield Fault(
            fact=f"elastic.spares={spares}",
            rule=f"it must be a multiple of parallel.tp={tp}: a tp group stays on one node, so it "
            "moves as a whole",
            remedy=f"use {-(-spares // tp) * tp}, or allow parallel.is_tp_across_nodes_allowed",
        )


@reads("elastic.min_workers, parallel.tp cp dp pp")
def min_workers_faults(least: int | str, *degrees: int) -> Iterator[Fault]:
    """Check that the least number of workers is not above that of the job's grid."""
    world_size = prod(degrees)
    if least != "grid" and int(least) > world_size:
        yield Fault(
            fact=f"elastic.min_workers={least}",
            rule=f"the job's own grid has {world_size} workers",
            remedy=f"use at most {world_size}, or `grid` to wait for the whole grid",
        )


def _ratio_rule(field: str) -> Rule:
    @reads(field)
    def ratio_faults(ratio: float) -> Iterator[Fault]:
        """Check that a bound, a multiple of the usual value, is more than 1; 0 turns it off."""
        if 0 < ratio <= 1:
            yield Fault(
                fact=f"{field}={ratio:g}",
                rule="what is usual itself may not be above the bound: it must be more than 1, or 0 for never",
                remedy="use 1.5 or more, or 0",
            )

    return ratio_faults


# One rule a field: a rule gets its values without their names.
RATIO_RULES = tuple(
    _ratio_rule(f"elastic.{name}") for name in ("spike_loss", "spike_grad_norm", "straggler_ratio")
)


@reads("elastic.hang_timeout_min_s hang_timeout_max_s")
def hang_faults(least_s: float, most_s: float) -> Iterator[Fault]:
    """Check that the bounds of the hang timeout are in order."""
    if least_s > most_s:
        yield Fault(
            fact=f"elastic.hang_timeout_min_s={least_s:g}",
            rule=f"it may not be above elastic.hang_timeout_max_s={most_s:g}",
            remedy=f"use at most {most_s:g}, or raise elastic.hang_timeout_max_s",
        )
