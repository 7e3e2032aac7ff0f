"""Rules of the elastic section that read other sections too."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from raymega.errors import Fault
from raymega.plan.validation.rule import Rule, fields, reads


@reads("cluster.host", "elastic.spares", "elastic.snapshot_every")
def host_faults(host: str, spares: int, snapshot_every: int) -> Iterator[Fault]:
    """What a host that keeps no process cannot do."""
    asked = {"elastic.spares": spares, "elastic.snapshot_every": snapshot_every}
    for field, value in asked.items():
        if host == "ray_train" and value > 0:
            yield Fault(
                fact=f"cluster.host={host} with {field}={value}",
                rule="Ray Train ends all workers together, and with them what they hold in memory",
                remedy=f"set {field}=0, or cluster.host=ray",
            )


@reads("elastic.spares", "parallel.tp", "parallel.is_tp_across_nodes_allowed")
def spares_faults(spares: int, tp: int, is_tp_across_nodes_allowed: bool) -> Iterator[Fault]:
    """A tp group that may not span nodes moves as a whole."""
    if spares % tp and not is_tp_across_nodes_allowed:
        yield Fault(
            fact=f"elastic.spares={spares}",
            rule=f"it must be a multiple of parallel.tp={tp}: a tp group stays on one node, so it "
            "moves as a whole",
            remedy=f"use {-(-spares // tp) * tp}, or allow parallel.is_tp_across_nodes_allowed",
        )


@reads("elastic.min_workers", "parallel.tp", "parallel.cp", "parallel.dp", "parallel.pp")
def min_workers_faults(least: int | str, *degrees: int) -> Iterator[Fault]:
    """No more workers than there are."""
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
        """Times something usual: at most once that is every second value."""
        if 0 < ratio <= 1:
            yield Fault(
                fact=f"{field}={ratio:g}",
                rule="what is usual itself may not be above the bound: it must be more than 1, or 0 for never",
                remedy="use 1.5 or more, or 0",
            )

    return ratio_faults


RATIO_RULES = tuple(
    map(_ratio_rule, fields("elastic", "spike_loss spike_grad_norm straggler_ratio"))
)


@reads("elastic.hang_timeout_min_s", "elastic.hang_timeout_max_s")
def hang_faults(least_s: float, most_s: float) -> Iterator[Fault]:
    """The bounds of the deadline, in order."""
    if least_s > most_s:
        yield Fault(
            fact=f"elastic.hang_timeout_min_s={least_s:g}",
            rule=f"it may not be above elastic.hang_timeout_max_s={most_s:g}",
            remedy=f"use at most {most_s:g}, or raise elastic.hang_timeout_max_s",
        )
