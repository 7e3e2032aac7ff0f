"""Predicted against measured order of layouts on CPU: 24 of one job, on at most four gloo ranks.

    python -m benchmarks.layout_order [--rounds N] [--layouts N]

The layouts are drawn by a fixed seed from all grids of at most four ranks, three micro-batch sizes, two kinds
of recompute and two levels of sharding. Kernels and transfers are measured first and give an accelerator, as
`raymega doctor --calibrate` does; then steps of seven layouts with other micro-batch sizes fit what a kernel
costs beside its work. Rounds of all layouts are interleaved, and each layout's figure is the median of its
steps. Seconds of cores are what all ranks together worked, which other work on the machine changes least.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from statistics import median

import torch
from scipy.stats import spearmanr

from raymega.config.load import parse_mapping
from raymega.messages import Requests
from raymega.plan.hardware.catalog import CATALOGUE, Accelerator
from raymega.plan.run_plan import RunPlan, make_plan, read_plan
from raymega.planner.calibration.fit import Case, Measurement, calibrate, fit_device
from raymega.planner.cost.step_time import step_time, work_s
from raymega.train.build import build_parts
from raymega.train.diagnostics.calibration import measure
from raymega.train.state import first_state
from raymega.train.step import train_step
from tests.support.ranks import run_grid

STEPS = 6
"""Steps of a round, the first of which does not count."""
TIMEOUT_S = 300.0
TIE = 0.10
"""Pairs of layouts whose measured times are nearer than this have no order."""
SEED, NUM_LAYOUTS, MOST_RANKS, BATCH = 0, 24, 4, 16
CALIBRATED_ON = (
    {"micro_batch_size": 2},
    {"micro_batch_size": 8},
    {"dp": 2, "micro_batch_size": 2},
    {"tp": 2, "micro_batch_size": 2},
    {"tp": 2, "micro_batch_size": 8},
    {"tp": 4, "micro_batch_size": 2},
    {"pp": 2, "micro_batch_size": 2},
)
OF_STEPS = ("matmul_share", "memory_share", "launch_s", "link_share", "link_latency_s")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A step of one layout: its seconds, and those of cores that all ranks together worked."""

    wall_s: float
    core_s: float


def main() -> None:
    """Calibrate, predict, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layouts", type=int, default=NUM_LAYOUTS)
    options = parser.parse_args()
    show(options.rounds, options.layouts)


def drawn(number: int) -> list[dict[str, object]]:
    """Return as many layouts, by the seed alone."""
    every = [
        {"tp": tp, "pp": pp, "dp": dp, "micro_batch_size": size, "recompute": again, "sharding": level}
        for tp, pp, dp in product((1, 2, 4), repeat=3)
        if tp * pp * dp <= MOST_RANKS
        for size in (1, 4, 16)
        if size * dp <= BATCH
        for again in ("none", "full")
        for level in (("none", "optimizer") if dp > 1 else ("none",))
    ]  # fmt: skip
    return random.Random(SEED).sample(every, number)


def show(rounds: int, number: int = NUM_LAYOUTS) -> float:
    """Print the table; the correlation of pairs that are no ties."""
    layouts, known = drawn(number), [make(layout) for layout in CALIBRATED_ON]
    plans = [make(layout) for layout in layouts]
    base = kernels_device()
    timed = medians([*plans, *known], rounds)
    measured, steps = timed[: len(plans)], timed[len(plans) :]
    device = calibrated(base, known, steps)
    predicted = [prediction(plan, device) for plan in plans]
    print(f"load {os.getloadavg()[0]:.1f}, {rounds} rounds of {STEPS - 1} steps")
    print(
        f"{'layout':40} {'ms':>8} {'predicted':>9} {'off':>6} {'core ms':>9} {'predicted':>9} {'off':>6}"
    )
    rows = zip(layouts, predicted, measured, strict=True)
    for layout, expected, found in sorted(rows, key=lambda row: row[2].wall_s):
        print(
            f"{_words(layout):40} {1e3 * found.wall_s:8.1f} {1e3 * expected.wall_s:9.1f} "
            f"{expected.wall_s / found.wall_s - 1:+6.0%} {1e3 * found.core_s:9.1f} "
            f"{1e3 * expected.core_s:9.1f} {expected.core_s / found.core_s - 1:+6.0%}"
        )
    show_order("cores", [p.core_s for p in predicted], [m.core_s for m in measured])
    return show_order("step", [p.wall_s for p in predicted], [m.wall_s for m in measured])


def prediction(plan: RunPlan, device: Accelerator) -> Timed:
    """Return the planner's prediction of wall and core time for a step."""
    # of one rank in the middle; their sum is what cores do
    core_s = plan.grid.world_size * work_s(plan, device)
    return Timed(wall_s=step_time(plan, device).total_s, core_s=core_s)


def show_order(what: str, predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Print how the two orders agree, and return the rank correlation of pairs that are no ties."""
    order = float(spearmanr(predicted, measured).statistic)
    right, pairs = ordered_pairs(predicted, measured)
    # Kendall's tau of the pairs that are no ties
    correlation = 2 * right / pairs - 1
    print(
        f"{what}: spread {max(measured) / min(measured):.1f}x, rank correlation {order:.3f} of all; of {pairs} "
        f"pairs more than {TIE:.0%} apart {right} are in order, correlation {correlation:.3f}"
    )
    return correlation


def ordered_pairs(predicted: Sequence[float], measured: Sequence[float]) -> tuple[int, int]:
    """Return how many pairs are predicted in the measured order, and how many are no ties."""
    right = pairs = 0
    for (p, m), (q, n) in combinations(zip(predicted, measured, strict=True), 2):
        if abs(m - n) > TIE * max(m, n):
            pairs += 1
            right += (p < q) == (m < n)
    return right, pairs


def kernels_device() -> Accelerator:
    """Return an accelerator fitted to this machine's kernels and transfers."""
    plan = make({"tp": 2, "dp": 2, "micro_batch_size": 1})
    # kernels on all ranks at once, as in a step: cores are shared then too
    found = run_grid(_measure_rank, plan.grid, timeout=TIMEOUT_S)
    return fit_device(CATALOGUE["cpu"], [each for rank in found for each in rank], name="here")


def calibrated(base: Accelerator, plans: Sequence[RunPlan], timed: Sequence[Timed]) -> Accelerator:
    """The same with constants that meet the work of ``plans``' ranks."""
    cases = [
        Case(name="step", seconds=each.core_s, predict=_predictor(plan))
        for plan, each in zip(plans, timed, strict=True)
    ]
    device = calibrate(base, cases, OF_STEPS, spread=2.0)
    print("before:", base.fitted)
    print("calibrated:", device.fitted)
    print(
        f"{device.peak_32_bit_flops / 1e9:.0f} GFLOP/s, {device.memory_bytes_per_s / 1e9:.1f} GB/s, links "
        f"{device.link_bytes_per_s / 1e9:.1f} GB/s, {device.shared_cores:.2f} cores"
    )
    print("errors of the steps fitted to:", *(f"{case.error(device):+.0%}" for case in cases))
    return device


def medians(plans: Sequence[RunPlan], rounds: int) -> list[Timed]:
    """A step of each plan, in interleaved rounds."""
    steps: list[list[Timed]] = [[] for _ in plans]
    for _ in range(rounds):
        for plan, mine in zip(plans, steps, strict=True):
            ranks = run_grid(_time_rank, plan.grid, plan.to_json(), timeout=TIMEOUT_S)
            mine += [
                Timed(
                    wall_s=max(each.wall_s for each in step),
                    core_s=sum(each.core_s for each in step),
                )
                for step in zip(*ranks, strict=True)
            ]
    return [
        Timed(
            wall_s=median(each.wall_s for each in mine), core_s=median(each.core_s for each in mine)
        )
        for mine in steps
    ]


def make(layout: dict[str, object]) -> RunPlan:
    """The job on a layout."""
    # what is left after micro-batch and recompute are fields of `parallel`
    free = dict(layout)
    schedule = {"micro_batch_size": free.pop("micro_batch_size")}
    memory = {"recompute": free.pop("recompute", "none")}
    return make_plan(
        parse_mapping(
            {
                "run": {"name": "order", "steps": 100, "eval_samples": 0},
                "model": {
                    "family": "llama", "num_layers": 4, "hidden_size": 128, "num_heads": 4,
                    "ffn_hidden_size": 384, "vocab_size": 1024, "max_positions": 64,
                },
                "data": {"path": "synthetic", "seq_len": 64, "global_batch_size": BATCH},
                "parallel": free,
                "schedule": schedule,
                "memory": memory,
                "optimizer": {"lr": 1e-4},
                "cluster": {"device": "cpu"},
            }
        ).job()
    )  # fmt: skip


def _words(layout: dict[str, object]) -> str:
    named = {k: v for k, v in layout.items() if v not in (1, "none") or k == "micro_batch_size"}
    return " ".join(f"{k}={v}" for k, v in named.items()).replace("micro_batch_size", "micro")


def _predictor(plan: RunPlan):  # a closure of one line
    return lambda device: plan.grid.world_size * work_s(plan, device)


def _measure_rank(env) -> list[Measurement]:  # tests.support's RankEnv
    torch.set_num_threads(1)
    found = []
    for measured, ranks in measure(env.groups, env.device, torch.float32, clock=time.process_time):
        sizes = measured.sizes
        if measured.kind == "all_reduce":
            sizes = (*sizes[:2], float(len(ranks)), float(env.groups.world.size))
        found.append(replace(measured, sizes=sizes))
    return found


def _time_rank(env, plan_json: str) -> list[Timed]:
    torch.set_num_threads(1)
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    state, timed = first_state(plan.job.precision), []
    for _ in range(STEPS):
        begun_s, worked_s = time.perf_counter(), time.process_time()
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        timed.append(
            Timed(wall_s=time.perf_counter() - begun_s, core_s=time.process_time() - worked_s)
        )
    return timed[1:]


if __name__ == "__main__":
    main()
