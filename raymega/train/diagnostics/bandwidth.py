"""Worker entry of `raymega doctor`: it times an all-reduce on each process group of the rank.

It is an entry module like `train/entry.py`, with the same rendezvous and groups, but does not train.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import cast

import torch

from raymega.messages import Channel, Entered, StartWorker, WorkerFinished
from raymega.parallel.comm import world
from raymega.parallel.comm.collectives import all_reduce, barrier
from raymega.parallel.comm.process_groups import Group, Groups, build_groups
from raymega.parallel.comm.world import Store
from raymega.plan.run_plan import RunPlan, read_plan
from raymega.train.entry import abort, host_rendezvous, warm_up
from raymega.train.environment import listen_towards, prepare_process

__all__ = ["abort", "host_rendezvous", "run_worker", "warm_up"]

NUM_BYTES = {"cpu": 2**22, "cuda": 2**28}
NUM_ROUNDS = 5
UNMEASURED = (
    "cp_inner",
    "cp_outer",
    "replicas",
    "pp_backward",
    "embedding",
    "micro",
    "edp",
    "sharers",
    "copies",
    "expert_sharers",
    "expert_copies",
)
"""Groups that repeat another group's ranks, or mix axes."""


def run_worker(start: StartWorker, channel: Channel, rendezvous: object) -> None:
    """Join the world, time an all-reduce on each axis, and report each as one Entered.

    ``detail`` holds the message's bytes and the group's ranks, as ``BYTES:0,1,2``.
    """
    with meeting(start, rendezvous) as (_, groups, device):
        for group in _measured(groups):
            # One axis at a time, so that no traffic of another one slows it.
            barrier(groups.world)
            num_bytes = NUM_BYTES[device.type]
            seconds = time_all_reduce(group, num_bytes, device)
            detail = f"{num_bytes}:{','.join(map(str, group.ranks))}"
            channel.report(
                Entered(rank=start.rank, phase=group.name, seconds=seconds, detail=detail)
            )
        if groups.world.size > 1:
            barrier(groups.world)
        channel.report(WorkerFinished(rank=start.rank, step=0, stopped=False))


@contextmanager
def meeting(
    start: StartWorker, rendezvous: object
) -> Iterator[tuple[RunPlan, Groups, torch.device]]:
    """Open the world and yield plan, groups and device; close the world afterwards."""
    plan = read_plan(start.plan_json)
    device = prepare_process(plan, device=start.device, local_rank=start.local_rank)
    timeout_s = plan.job.elastic.collective_timeout_s
    listen_towards(start.rendezvous)
    world.open_world(
        rank=start.rank,
        world_size=plan.grid.world_size,
        rendezvous=start.rendezvous,
        store=cast(Store | None, rendezvous),
        timeout_s=timeout_s,
        device=device,
    )
    try:
        yield plan, build_groups(plan.grid, start.rank, timeout_s=timeout_s), device
    finally:
        world.close_world()


def _measured(groups: Groups) -> Iterator[Group]:
    # Field order, which is equal on all ranks, so that collectives match. A sum along axes is several all-reduces.
    for field in fields(groups):
        group = getattr(groups, field.name)
        is_one = isinstance(group, Group) and group.size > 1 and not group.axes
        if is_one and field.name not in UNMEASURED:
            yield group


def time_all_reduce(group: Group, num_bytes: int, device: torch.device) -> float:
    """Return the median seconds of NUM_ROUNDS all-reduces, after one that opens connections."""
    tensor = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(NUM_ROUNDS + 1):
        begun_s = time.monotonic()
        all_reduce(tensor, group)
        synchronize(device)
        seconds.append(time.monotonic() - begun_s)
    return sorted(seconds[1:])[NUM_ROUNDS // 2]


def synchronize(device: torch.device) -> None:
    """Wait for queued work of a GPU; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
