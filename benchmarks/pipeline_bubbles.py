"""Bubbles as measured and as simulated, with sleeps for work and real messages between real ranks.

A sleep takes no core, so ranks do not take each other's idle time, as they do where cores are few. Every stage
sleeps in its forward, in its backward for the input's gradient, and for the weight's, which the schedule may put
off; chunks sleep a part each. The simulator is told the intended times, not the measured ones.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raymega.parallel.comm.process_groups import build_groups
from raymega.parallel.comm.world import open_world
from raymega.parallel.core.weight_grads import ComputedTerm, WeightGradQueue
from raymega.pipeline.executor import Executor
from raymega.pipeline.p2p import PointToPoint
from raymega.plan.grid import Grid
from raymega.schedule.order import Sizes
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.table import SCHEDULES, make_schedule
from raymega.schedule.timeline import Event, bubble

CPU = torch.device("cpu")
TIMEOUT_S = 120.0
UNIT_S = 0.1
"""Seconds of a forward of a whole rank; both parts of its backward take as long."""
STEPS = 3
"""After one that is not counted; the median counts."""
NAMES = ("gpipe", "1f1b", "interleaved", "dualpipe_v", "zb_h1", "zb_h2", "zb_auto", "zb_v")
MOST_POINTS = 3.0
SHAPE = (4, 1, 8)


class _Sleeper(torch.autograd.Function):
    """y = x, in time."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, unit_s: float, grad_queue: WeightGradQueue
    ) -> Tensor:
        ctx.unit_s, ctx.grad_queue, ctx.param = unit_s, grad_queue, weight
        time.sleep(unit_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        unit_s, param = ctx.unit_s, ctx.param

        # the weight's gradient, which the queue computes now or when the schedule says so
        def make() -> Tensor:
            time.sleep(unit_s)
            return torch.zeros_like(param)

        time.sleep(unit_s)
        return grad, ctx.grad_queue.accumulate_or_defer(param, ComputedTerm(make)), None, None


def sizes_of(name: str, pp: int) -> Sizes:
    """Enough micro-batches that zero-bubble schedules have none; zb_auto may hold what zb_h2 does."""
    return Sizes(
        pp=pp,
        num_micro_batches=2 * pp + 2,
        chunks=SCHEDULES[name].least_chunks,
        max_in_flight_microbatches=2 * pp - 1,
    )


def simulated(name: str, pp: int) -> float:
    return simulate(make_schedule(name, sizes_of(name, pp)), Durations()).bubble


def _executor(name: str, rank: int, pp: int, unit_s: float, groups) -> tuple[Executor, int]:
    sizes = sizes_of(name, pp)
    program = make_schedule(name, sizes)
    # chunks share a rank's work, so that all schedules do as much in all
    placement, own_s = program.placement, unit_s / sizes.chunks
    deferrals = [WeightGradQueue() for _ in range(sizes.chunks)]

    def stage_fn(
        _: int, hidden: Tensor | None, *, stage: int, grad_queue: WeightGradQueue, weight: Tensor
    ) -> Tensor:
        x = torch.zeros(SHAPE) if hidden is None else hidden
        # the last stage returns a loss, from which its backward starts
        output = _Sleeper.apply(x, weight, own_s, grad_queue)
        return output.sum() if stage == placement.num_stages - 1 else output

    fns = [
        partial(
            stage_fn,
            stage=placement.stage(rank, chunk),
            grad_queue=grad_queue,
            weight=torch.zeros(1, requires_grad=True),
        )
        for chunk, grad_queue in enumerate(deferrals)
    ]
    p2p = PointToPoint(
        groups, placement=placement, shape=SHAPE, dtype=torch.float32, device=CPU, timeout_s=TIMEOUT_S
    )  # fmt: skip
    return Executor(program.lists[rank], fns, p2p, deferrals=deferrals), sizes.num_micro_batches


def _measure(
    rank: int, folder: str, pp: int, names: tuple[str, ...], unit_s: float, results
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), pp)
    open_world(
        rank=rank, world_size=pp, rendezvous="", store=store, timeout_s=TIMEOUT_S, device=CPU
    )
    groups = build_groups(Grid(pp=pp), rank, timeout_s=TIMEOUT_S)
    found: dict[str, list[list[Event]]] = {}
    for name in names:
        executor, num_micro_batches = _executor(name, rank, pp, unit_s, groups)
        steps = []
        for _ in range(1 + STEPS):
            dist.barrier()
            steps.append(list(executor.run(range(num_micro_batches), is_recording=True).events))
        # the first step opens connections and allocates
        found[name] = steps[1:]
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def measured(pp: int, names: tuple[str, ...], unit_s: float) -> dict[str, float]:
    """The median bubble of each schedule over some steps."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_measure, args=(rank, folder, pp, names, unit_s, results))
            for rank in range(pp)
        ]
        for rank in ranks:
            rank.start()
        found = dict(results.get(timeout=1200) for _ in ranks)
        for rank in ranks:
            rank.join()
    medians = {}
    for name in names:
        ratios = [
            bubble([found[rank][name][step] for rank in range(pp)]).ratio for step in range(STEPS)
        ]
        medians[name] = sorted(ratios)[STEPS // 2]
    return medians


def run(*, is_quick: bool, picture: Path | None) -> bool:
    """Print the table; whether all are within the bar and zero-bubble ones clearly below 1F1B."""
    names = ("1f1b", "zb_h1", "zb_v") if is_quick else NAMES
    table: dict[int, dict[str, tuple[float, float]]] = {}
    for pp in (4,) if is_quick else (4, 8):
        both = measured(pp, names, UNIT_S)
        table[pp] = {name: (both[name], simulated(name, pp)) for name in names}
    is_within = True
    for pp, rows in table.items():
        for name, (real, ideal) in rows.items():
            points = 100 * (real - ideal)
            # two bars: near the simulation, and zero-bubble schedules below three quarters of 1F1B
            is_within &= abs(points) <= MOST_POINTS
            if name.startswith("zb_"):
                is_within &= real < 0.75 * rows["1f1b"][0]
            print(
                f"pp={pp} {name:12} bubble measured {real:6.3f}  simulated {ideal:6.3f}  "
                f"difference {points:+5.1f} points"
            )
    row = {str(pp): {name: list(pair) for name, pair in rows.items()} for pp, rows in table.items()}
    print(json.dumps({"name": "bubbles", "load": os.getloadavg()[0], "unit_s": UNIT_S, **row}))
    if picture is not None:
        draw(table, picture)
    return is_within


def draw(table: dict[int, dict[str, tuple[float, float]]], path: Path) -> None:
    """Bars of both beside each other, a panel for each number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "raymega"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(table), figsize=(5 * len(table), 3.6), squeeze=False)
    for axes, (pp, rows) in zip(panels[0], table.items(), strict=True):
        for offset, column, label, colour in (
            (-0.2, 1, "simulated", "#56b4e9"),
            (0.2, 0, "measured", "#e69f00"),
        ):
            heights = [pair[column] for pair in rows.values()]
            places = [index + offset for index in range(len(rows))]
            axes.bar(places, heights, width=0.38, label=label, color=colour)
        axes.set_xticks(range(len(rows)), list(rows), rotation=35, ha="right")
        axes.set_title(f"{pp} ranks, {sizes_of('1f1b', pp).num_micro_batches} micro-batches")
        axes.set_ylabel("bubble: idle over ideal time")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
