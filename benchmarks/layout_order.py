"""Predicted against measured order of layouts on CPU: twelve of one job, on at most four gloo ranks.

    python benchmarks/layout_order.py [--rounds N]

Kernels and transfers are measured first and give an accelerator, as `raymega doctor --calibrate` does; then
steps of three layouts that are none of the twelve fit what a kernel costs beside its work. Rounds of all layouts
are interleaved, and each layout's figure is the median of its steps. The machine may be busy: the load is printed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median

import torch
from scipy.stats import spearmanr

from raymega.config.load import parse_mapping
from raymega.messages import Requests
from raymega.plan.accelerators import CATALOGUE, Accelerator
from raymega.plan.calibration import Case, Measurement, calibrate, fit_device
from raymega.plan.run_plan import RunPlan, make_plan, read_plan
from raymega.plan.step_time import step_time
from raymega.train.build import build_parts
from raymega.train.calibration import measure
from raymega.train.state import first_state
from raymega.train.step import train_step
from tests.support.ranks import run_grid

STEPS = 3
"""Of a round, the first of which does not count."""
TIMEOUT_S = 300.0
TIE = 0.10
"""Pairs of layouts whose measured times are nearer than this have no order."""
LAYOUTS = (
    {"micro_batch_size": 16},
    {"micro_batch_size": 1},
    {"micro_batch_size": 4, "recompute": "full"},
    {"dp": 2, "micro_batch_size": 8},
    {"dp": 4, "micro_batch_size": 4, "sharding": "optimizer"},
    {"dp": 4, "micro_batch_size": 1},
    {"tp": 2, "micro_batch_size": 8},
    {"tp": 4, "micro_batch_size": 4, "sequence_parallel": True},
    {"tp": 4, "micro_batch_size": 1},
    {"pp": 4, "micro_batch_size": 1},
    {"pp": 2, "dp": 2, "micro_batch_size": 4},
    {"tp": 2, "dp": 2, "micro_batch_size": 1},
)
CALIBRATED_ON = (
    {"micro_batch_size": 2},
    {"micro_batch_size": 8},
    {"dp": 2, "micro_batch_size": 2},
    {"tp": 2, "micro_batch_size": 2},
    {"tp": 4, "micro_batch_size": 2},
)
OF_STEPS = ("matmul_share", "launch_s", "link_share", "link_latency_s")
MOST_CORES = 4
"""Of a busy machine four processes may get more than its cores' share of one: tried, and the best kept."""


def main() -> None:
    """Calibrate, predict, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    show(options.rounds)


def show(rounds: int) -> float:
    """Print the table; the rank correlation."""
    plans = [make(layout) for layout in LAYOUTS]
    known = [make(layout) for layout in CALIBRATED_ON]
    base = kernels_device()
    seconds = medians([*plans, *known], rounds)
    measured, steps = seconds[: len(plans)], seconds[len(plans) :]
    device = calibrated(base, known, steps)
    predicted = [step_time(plan, device).total_s for plan in plans]
    order = float(spearmanr(predicted, measured).statistic)
    print(
        f"load {os.getloadavg()[0]:.1f}, {rounds} rounds of {STEPS - 1} steps, {device.shared_cores} cores at once"
    )
    print(f"{'layout':44} {'predicted ms':>12} {'measured ms':>12} {'off':>7}")
    for layout, expected, found in sorted(
        zip(LAYOUTS, predicted, measured, strict=True), key=lambda row: row[2]
    ):
        text = " ".join(f"{k}={v}" for k, v in layout.items())
        print(f"{text:44} {1e3 * expected:12.1f} {1e3 * found:12.1f} {expected / found - 1:+7.0%}")
    right, pairs = ordered_pairs(predicted, measured)
    print(
        f"spread {max(measured) / min(measured):.1f}x, rank correlation {order:.3f} of all; of {pairs} pairs "
        f"more than {TIE:.0%} apart {right} are in order, correlation {2 * right / pairs - 1:.3f}"
    )
    return order


def ordered_pairs(predicted: Sequence[float], measured: Sequence[float]) -> tuple[int, int]:
    """Pairs predicted in the order in which they were measured, and all that are no tie."""
    right = pairs = 0
    for (p, m), (q, n) in combinations(zip(predicted, measured, strict=True), 2):
        if abs(m - n) > TIE * max(m, n):
            pairs += 1
            right += (p < q) == (m < n)
    return right, pairs


def kernels_device() -> Accelerator:
    """This machine by its kernels and transfers."""
    plan = make({"tp": 2, "dp": 2, "micro_batch_size": 1})
    found = run_grid(_measure_rank, plan.grid, timeout=TIMEOUT_S)
    return fit_device(CATALOGUE["cpu"], [each for rank in found for each in rank], name="here")


def calibrated(
    base: Accelerator, plans: Sequence[RunPlan], seconds: Sequence[float]
) -> Accelerator:
    """The same with constants that meet the steps of ``plans``."""
    cases = [
        Case(name="step", seconds=taken, predict=_predictor(plan))
        for plan, taken in zip(plans, seconds, strict=True)
    ]
    fits = [
        calibrate(replace(base, shared_cores=cores), cases, OF_STEPS, spread=2.0)
        for cores in range(1, MOST_CORES + 1)
    ]
    device = min(fits, key=lambda each: sum(case.error(each) ** 2 for case in cases))
    print("calibrated:", device.fitted, f"{device.peak_32_bit_flops / 1e9:.0f} GFLOP/s")
    print("errors of the steps fitted to:", *(f"{case.error(device):+.0%}" for case in cases))
    return device


def medians(plans: Sequence[RunPlan], rounds: int) -> list[float]:
    """Seconds of a step of each plan, in interleaved rounds."""
    seconds: list[list[float]] = [[] for _ in plans]
    for _ in range(rounds):
        for plan, mine in zip(plans, seconds, strict=True):
            ranks = run_grid(_time_rank, plan.grid, plan.to_json(), timeout=TIMEOUT_S)
            mine += [max(times) for times in zip(*ranks, strict=True)]
    return [median(each) for each in seconds]


def make(layout: dict[str, object]) -> RunPlan:
    """The job on a layout."""
    free = dict(layout)
    schedule = {"micro_batch_size": free.pop("micro_batch_size")}
    memory = {"recompute": free.pop("recompute", "none")}
    return make_plan(
        parse_mapping(
            {
                "run": {"name": "order", "steps": 100, "eval_samples": 0},
                "model": {
                    "family": "llama", "num_layers": 4, "width": 128, "num_heads": 4,
                    "ffn_width": 384, "vocab_size": 1024, "max_positions": 64,
                },
                "data": {"path": "synthetic", "seq_len": 64, "global_batch_size": 16},
                "parallel": free,
                "schedule": schedule,
                "memory": memory,
                "optimizer": {"lr": 1e-4},
                "cluster": {"device": "cpu"},
            }
        ).job()
    )  # fmt: skip


def _predictor(plan: RunPlan):  # a closure of one line
    return lambda device: step_time(plan, device).total_s


def _measure_rank(env) -> list[Measurement]:  # tests.support's RankEnv
    torch.set_num_threads(1)
    found = []
    for measured, ranks in measure(env.groups, env.device, torch.float32):
        sizes = measured.sizes
        if measured.kind == "all_reduce":
            sizes = (*sizes[:2], float(len(ranks)))
        found.append(replace(measured, sizes=sizes))
    return found


def _time_rank(env, plan_json: str) -> list[float]:
    torch.set_num_threads(1)
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    state, seconds = first_state(plan.job.precision), []
    for _ in range(STEPS):
        begun_s = time.perf_counter()
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        seconds.append(time.perf_counter() - begun_s)
    return seconds[1:]


if __name__ == "__main__":
    main()
