"""Expert dispatch overlapped with the compute of another micro-batch, against exposed dispatch, on a slow link.

    python -m benchmarks.expert_overlap [--mbit 500 1000 2000] [--rounds 11] [--quick]

Two gloo ranks with a core each in a network namespace whose loopback is limited to --mbit megabits per second,
both directions together (tc's token bucket): transfers then take time and no core, as on a cluster.
Whole steps of the same run with parallel.overlap_moe_expert_parallel_comm true and false, in turn. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.measure import Sample, report
from raymega.config.load import parse_mapping
from raymega.messages import Requests
from raymega.parallel.comm.collectives import barrier
from raymega.plan.run_plan import RunPlan, make_plan, read_plan
from raymega.train.build import build_parts
from raymega.train.state import first_state
from raymega.train.step import train_step
from tests.support.ranks import RankEnv, run_grid

IS_INSIDE = "RAYMEGA_BENCHMARK_NAMESPACE"
SEQ_LEN, MICRO_BATCHES, RANKS = 256, 8, 2
MODEL = {
    "family": "llama", "num_layers": 4, "hidden_size": 256, "num_heads": 4, "ffn_hidden_size": 512,
    "vocab_size": 1024, "max_positions": SEQ_LEN,
    "moe": {"num_experts": 8, "top_k": 2, "intermediate_size": 512},
}  # fmt: skip


def make_overlap_plan(*, is_overlapped: bool) -> RunPlan:
    """Data parallel attention, half of the experts on each rank, eight micro-batches a rank."""
    job = parse_mapping(
        {
            "run": {"name": "benchmark", "steps": 10**6, "eval_samples": 0},
            "model": MODEL,
            "data": {
                "path": "synthetic",
                "seq_len": SEQ_LEN,
                "global_batch_size": 2 * MICRO_BATCHES * RANKS,
            },
            "parallel": {
                "dp": RANKS,
                "ep": RANKS,
                "overlap_moe_expert_parallel_comm": is_overlapped,
            },
            "schedule": {"micro_batch_size": 2},
            "optimizer": {"lr": 1e-4, "lr_schedule": "constant"},
            "precision": {"dtype": "float32"},
        }
    ).job()
    return make_plan(job)


class Steps:
    """Training steps of one rank for one side of the comparison; a call runs one step."""

    def __init__(self, env: RankEnv, plan: RunPlan) -> None:
        self.parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
        self.state = first_state(plan.job.precision)

    def __call__(self) -> float:
        outcome = train_step(self.parts, self.state, Requests(), is_recording=False)
        self.state = outcome.state
        return outcome.loss


def _time_both(env: RankEnv, plans: list[str], rounds: int) -> list[list[Sample]]:
    torch.set_num_threads(1)
    sides = [Steps(env, read_plan(plan)) for plan in plans]
    samples: list[list[Sample]] = [[], []]
    # the first round warms up; the side that goes first alternates
    for number in range(rounds + 1):
        losses = {}
        for side in (0, 1) if number % 2 else (1, 0):
            # both ranks begin a step together, so that no side pays for the other's lag
            barrier(env.groups.world)
            wall, cpu = time.perf_counter(), time.process_time()
            losses[side] = sides[side]()
            sample = Sample(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)
            if number:
                samples[side].append(sample)
        assert losses[0] == losses[1], "both sides are one run"
    return samples


def compare(mbit: int, rounds: int) -> dict[str, Any]:
    """Steps at one speed of the link; 0 is as fast as loopback is."""
    if mbit:
        # a token bucket delays packets and takes no core, as a slow network does
        limit = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "10s"]
        subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *limit], check=True)
    plans = [make_overlap_plan(is_overlapped=each) for each in (True, False)]
    ranks = run_grid(
        _time_both, plans[0].grid, [plan.to_json() for plan in plans], rounds, timeout=600
    )
    pairs = [
        tuple(_slowest([samples[side][i] for samples in ranks]) for side in (0, 1))
        for i in range(rounds)
    ]
    name = f"{mbit} Mbit/s" if mbit else "loopback as it is"
    return report(name, pairs, mbit=mbit, micro_batches=MICRO_BATCHES)


def _slowest(samples: list[Sample]) -> Sample:
    """Return the longest wall time of all ranks, and the sum of their CPU times."""
    return Sample(
        wall_s=max(each.wall_s for each in samples), cpu_s=sum(each.cpu_s for each in samples)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 500, 1000, 2000])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="one speed, three rounds")
    options = parser.parse_args()
    # limits of the loopback must not reach this machine: start again in a namespace of its own
    if IS_INSIDE not in os.environ:
        command = [sys.executable, "-m", "benchmarks.expert_overlap", *sys.argv[1:]]
        inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
        sys.exit(subprocess.run(inside, env=os.environ | {IS_INSIDE: "1"}, check=False).returncode)
    speeds = [1000] if options.quick else options.mbit
    for mbit in speeds:
        compare(mbit, 3 if options.quick else options.rounds)


if __name__ == "__main__":
    main()
