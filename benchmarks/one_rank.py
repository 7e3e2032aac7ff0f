"""Rank of raymega for benchmarks: the components of a real run on one rank, and its training step."""

from __future__ import annotations

from typing import Any

import torch

from raymega.config.load import parse_mapping
from raymega.messages import Requests
from raymega.parallel.comm.process_groups import build_groups
from raymega.plan.run_plan import RunPlan, make_plan
from raymega.train.build import TrainingComponents, build_parts
from raymega.train.environment import prepare_process
from raymega.train.state import TrainState, first_state
from raymega.train.step import train_step

CPU = torch.device("cpu")


def make_one_rank_plan(
    model: dict[str, Any],
    *,
    seq_len: int,
    batch: int,
    micro_batch: int,
    dtype: str,
    kernels: str = "eager",
) -> RunPlan:
    """A job on built-in tokens, as a user would write it."""
    job = parse_mapping(
        {
            "run": {"name": "benchmark", "steps": 10**6, "eval_samples": 0, "kernels": kernels},
            "model": {"max_positions": seq_len, **model},
            "data": {"path": "synthetic", "seq_len": seq_len, "global_batch_size": batch},
            "schedule": {"micro_batch_size": micro_batch},
            "optimizer": {"lr": 1e-4, "lr_schedule": "constant"},
            "precision": {"dtype": dtype},
        }
    ).job()
    return make_plan(job)


class OneRank:
    """A whole training step at a call."""

    def __init__(self, plan: RunPlan) -> None:
        # on a CPU the caller sets threads
        is_gpu = plan.job.cluster.device == "cuda"
        device = prepare_process(plan, device="cuda", local_rank=0) if is_gpu else CPU
        groups = build_groups(plan.grid, 0, timeout_s=60.0)
        self.parts: TrainingComponents = build_parts(plan, rank=0, groups=groups, device=device)
        self.state: TrainState = first_state(plan.job.precision)

    def __call__(self) -> float:
        outcome = train_step(self.parts, self.state, Requests(), is_recording=False)
        self.state = outcome.state
        return outcome.loss
