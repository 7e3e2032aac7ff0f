"""Worker entry of `raymega doctor --calibrate`: it times kernels, and all-reduces of many sizes.

It is an entry module like `train/diagnostics/bandwidth.py`, and does not train.
`planner/calibration/` fits the planner's constants to the measurements.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from torch.nn.functional import scaled_dot_product_attention

from raymega.messages import Channel, Entered, StartWorker, WorkerFinished
from raymega.parallel.comm.collectives import barrier
from raymega.parallel.comm.process_groups import Group, Groups
from raymega.planner.calibration.fit import Measurement
from raymega.train.build_model import DTYPES
from raymega.train.diagnostics.bandwidth import (
    abort,
    host_rendezvous,
    meeting,
    synchronize,
    time_all_reduce,
    warm_up,
)

__all__ = ["abort", "host_rendezvous", "run_worker", "warm_up"]

NUM_ROUNDS = 5
LEAST_S = 0.02
"""Least seconds of a round: shorter calls are repeated, so that clock resolution matters less."""
PRODUCTS = {
    "cpu": ((1024, 1024, 1024), (512, 64, 512), (256, 256, 1024), (128, 128, 128), (64, 32, 64)),
    "cuda": ((8192, 8192, 8192), (8192, 1024, 8192), (4096, 128, 4096), (2048, 2048, 2048)),
}
ATTENTION = {"cpu": (8, 256, 64), "cuda": (32, 4096, 128)}
"""Heads, positions and head width of the attention kernel that is timed."""
MEMORY_BYTES = {"cpu": 2**25, "cuda": 2**30}
REDUCED_BYTES = {
    "cpu": (2**10, 2**14, 2**17, 2**20, 2**22),
    "cuda": (2**12, 2**16, 2**20, 2**24, 2**28),
}
LAUNCHES = 64


def run_worker(start: StartWorker, channel: Channel, rendezvous: object) -> None:
    """Join the world and report each measurement as one Entered; ``detail`` is JSON."""
    with meeting(start, rendezvous) as (plan, groups, device):
        for measured, ranks in measure(groups, device, DTYPES[plan.job.precision.dtype]):
            detail = json.dumps({"measured": asdict(measured), "ranks": ranks})
            channel.report(
                Entered(
                    rank=start.rank, phase=measured.kind, seconds=measured.seconds, detail=detail
                )
            )
    channel.report(WorkerFinished(rank=start.rank, step=0, stopped=False))


def measure(
    groups: Groups,
    device: torch.device,
    dtype: torch.dtype,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[Measurement, tuple[int, ...]]]:
    """Yield each measurement with the ranks that made it.

    Kernels run on the first rank while the others wait, then on all ranks together.

    Args:
        groups: Process groups whose all-reduces are timed.
        device: Device of this rank.
        dtype: Data type of the matrix products.
        clock: Clock in seconds for kernels; CPU time where other processes share the CPU.
    """
    world = groups.world
    first = world.index == 0
    element = dtype.itemsize
    # kernels, alone on the machine
    if first:
        for kind, sizes, call in kernels(device, dtype):
            seconds = timed(call, device, clock=clock)
            yield Measurement(kind=kind, sizes=sizes, element=element, seconds=seconds), (0,)
    if world.size == 1:
        return
    barrier(world)
    # the same kernel on all ranks: what shared cores and memory cost
    yield from _shares(world, device, dtype, is_first=first)
    # all-reduces; groups with equal ranks are timed once
    reduced = {group.ranks: group for group in (groups.world, groups.tp, groups.dp)}
    # a sum along axes is several all-reduces
    for group in (group for group in reduced.values() if group.size > 1 and not group.axes):
        for num_bytes in REDUCED_BYTES[device.type]:
            barrier(world)
            seconds = time_all_reduce(group, num_bytes, device)
            sizes = (float(num_bytes), float(group.size), 0.0, 0.0)
            measured = Measurement(kind="all_reduce", sizes=sizes, element=4, seconds=seconds)
            yield measured, group.ranks


def kernels(
    device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, tuple[float, ...], Callable[[], object]]]:
    """Yield each kernel's kind, its sizes, and a call that runs it."""
    for rows, inner, columns in PRODUCTS[device.type]:
        a, b = (
            torch.ones(rows, inner, device=device, dtype=dtype),
            torch.ones(inner, columns, device=device, dtype=dtype),
        )
        out = torch.empty(rows, columns, device=device, dtype=dtype)
        yield (
            "matmul",
            (rows, inner, columns),
            lambda a=a, b=b, out=out: torch.mm(a, b, out=out),  # type: ignore[misc]
        )
    # attention: causal, one sequence
    heads, positions, width = ATTENTION[device.type]
    q = torch.ones(1, heads, positions, width, device=device, dtype=dtype)
    yield (
        "attention",
        (heads * positions, positions, width),
        lambda: scaled_dot_product_attention(q, q, q, is_causal=True),
    )
    # memory bandwidth: x += y reads two tensors and writes one
    x = torch.zeros(MEMORY_BYTES[device.type] // dtype.itemsize, device=device, dtype=dtype)
    y = torch.ones_like(x)
    yield "memory", (3.0 * x.numel() * dtype.itemsize,), lambda: x.add_(y)
    # launch overhead: many tiny kernels, forward and backward
    small = torch.zeros(16, device=device, dtype=dtype, requires_grad=True)

    def launches() -> None:
        value = small
        for _ in range(LAUNCHES):
            value = value * 1.0
        value.sum().backward()

    yield "launch", (2.0 * LAUNCHES,), launches


def timed(
    call: Callable[[], object],
    device: torch.device,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Return the median seconds of a call, after one that warms up."""
    call()
    synchronize(device)
    # one call tells how many fill a round
    begun_s = clock()
    call()
    synchronize(device)
    once = clock() - begun_s
    # 1e-9: a coarse clock may read zero
    repeats = max(1, int(LEAST_S / max(once, 1e-9)))
    seconds = []
    for _ in range(NUM_ROUNDS):
        begun_s = clock()
        for _ in range(repeats):
            call()
        synchronize(device)
        seconds.append((clock() - begun_s) / repeats)
    return sorted(seconds)[NUM_ROUNDS // 2]


def _shares(
    world: Group, device: torch.device, dtype: torch.dtype, *, is_first: bool
) -> Iterator[tuple[Measurement, tuple[int, ...]]]:
    """Yield, on the first rank, a product's time on all ranks at once over its time alone."""
    _, _, call = next(iter(kernels(device, dtype)))
    alone = timed(call, device) if is_first else 0.0
    barrier(world)
    together = timed(call, device)
    barrier(world)
    if is_first:
        measured = Measurement(
            kind="share", sizes=(float(world.size), float(os.cpu_count() or 1)), element=dtype.itemsize,
            seconds=together / alone,
        )  # fmt: skip
        yield measured, world.ranks
