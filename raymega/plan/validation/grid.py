"""Check the rules of the grid: degrees, order of axes, and number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from raymega.config.moe import MoeSection
from raymega.errors import Fault
from raymega.plan.grid import AXES
from raymega.plan.validation.rule import divisors, reads

MOST_RANKS = 200_000
"""Most ranks of a grid, above the largest cluster that there is."""


@reads("parallel.order tp cp dp ep etp")
def grid_faults(order: str, tp: int, cp: int, dp: int, ep: int, etp: int) -> Iterator[Fault]:
    """Check that etp * ep divides the ranks of a pipeline stage, and that the order names every axis."""
    ranks, sharers = tp * cp * dp, etp * ep
    if ranks % sharers:
        yield Fault(
            fact=f"parallel.etp={etp} and parallel.ep={ep}",
            rule=f"experts lie on the ranks of a pipeline stage, so etp * ep = {sharers} must "
            f"divide tp={tp} * cp={cp} * dp={dp} = {ranks} (remainder {ranks % sharers})",
            remedy=f"use an etp * ep of {divisors(ranks)}",
        )
    if sorted(order.split("-")) != sorted(AXES):
        yield Fault(
            fact=f"parallel.order={order!r}",
            rule=f"it must name each of {', '.join(AXES)} once, joined by '-'",
            remedy="use tp-cp-ep-dp-pp, or the order you want with all five",
        )


@reads("cluster.num_workers, parallel.tp cp dp pp")
def world_faults(num_workers: int | str, tp: int, cp: int, dp: int, pp: int) -> Iterator[Fault]:
    """Check that the grid has as many ranks as the job has workers."""
    world_size = tp * cp * dp * pp
    if num_workers in ("grid", world_size):
        return
    # remedy: dp changes no other cut, so it is named first where it fits
    others = world_size // dp
    remedy = f"set cluster.num_workers={world_size}"
    if int(num_workers) % others == 0:
        remedy = f"set parallel.dp={int(num_workers) // others}, or {remedy}"
    yield Fault(
        fact=f"cluster.num_workers={num_workers}",
        rule=f"it must equal parallel tp={tp} * cp={cp} * dp={dp} * pp={pp} = {world_size}",
        remedy=remedy,
    )


@reads("parallel.tp cp dp pp")
def size_faults(tp: int, cp: int, dp: int, pp: int) -> Iterator[Fault]:
    """Check that the ranks are few enough to be listed."""
    world_size = tp * cp * dp * pp
    if world_size > MOST_RANKS:
        yield Fault(
            fact=f"parallel tp={tp} * cp={cp} * dp={dp} * pp={pp} = {world_size:,} workers",
            rule=f"a plan lists the ranks one by one, {MOST_RANKS:,} at most",
            remedy="use smaller degrees, such as --grid tp=8,pp=8,dp=64",
        )


@reads("parallel.sharding data_parallel_shard_degree dp cp tp ep etp, model.moe")
def sharding_group_faults(
    sharding: str, group: int | str, dp: int, cp: int, tp: int, ep: int, etp: int, moe: MoeSection
) -> Iterator[Fault]:
    """Check that a hybrid sharding group divides the replicas of dense tensors and of experts."""
    if group == "all":
        return
    size = int(group)
    if sharding == "none":
        yield Fault(
            fact=f"parallel.data_parallel_shard_degree={size}",
            rule="parallel.sharding=none shares nothing out",
            remedy="set parallel.sharding=optimizer, gradients or parameters, or "
            "parallel.data_parallel_shard_degree=all",
        )
        return
    # One degree serves both kinds of replicas.
    replicas = {"parallel.dp * parallel.cp": dp * cp}
    if moe.num_experts:
        replicas["the replicas of experts, tp * cp * dp / (etp * ep)"] = tp * cp * dp // (etp * ep)
    ranks = gcd(*replicas.values())
    for what, number in replicas.items():
        if size == 1 or number % size:
            yield Fault(
                fact=f"parallel.data_parallel_shard_degree={size}",
                rule=f"it must be more than 1 and divide {what} = {number} (remainder {number % size})",
                remedy=f"use {', '.join(filter(None, (divisors(ranks, least=2), 'all')))}",
            )
