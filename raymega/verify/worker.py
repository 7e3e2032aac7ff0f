"""Rank of a verified layout: trains some steps, evaluates, and writes its numbers to a file.

It assembles its components with `train/build.py`, as a real run does. Only this module and the fork
server import torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raymega.messages import Box, Requests
from raymega.optim.param_groups import rates_of
from raymega.parallel.comm.process_groups import groups_of_plan
from raymega.parallel.comm.world import close_world, file_store, open_world
from raymega.plan.run_plan import read_plan
from raymega.train.build import TrainingComponents, build_parts
from raymega.train.forward_backward import evaluate
from raymega.train.state import TrainState
from raymega.train.step import train_step
from raymega.verify.compare import StepValues
from raymega.verify.plain_evaluation import plain_eval_loss
from raymega.verify.results import result_path


def train_rank(rank: int, plan_json: str, folder: Path, *, steps: int, timeout_s: float) -> None:
    """Train rank ``rank`` of the plan in a world of its own, and save its numbers."""
    # All ranks share this machine's cores.
    torch.set_num_threads(1)
    plan, cpu = read_plan(plan_json), torch.device("cpu")
    world_size = plan.grid.world_size
    if world_size > 1:
        open_world(
            rank=rank,
            world_size=world_size,
            rendezvous="",
            store=file_store(folder / "store", world_size),
            timeout_s=timeout_s,
            device=cpu,
        )
    groups = groups_of_plan(plan, rank, timeout_s=timeout_s)
    # build, train, save
    parts = build_parts(plan, rank=rank, groups=groups, device=cpu)
    for module in parts.modules:
        # Margins of fp8 roundings matter for the reference alone.
        module.fp8.margin.is_watched = world_size == 1
    _train(parts, steps, folder, rank)
    parts.weights.wait_for_all()
    close_world()


def _train(parts: TrainingComponents, steps: int, folder: Path, rank: int) -> None:
    job, state, curve = parts.plan.job, TrainState(), []
    arrays: dict[str, Any] = {}
    blocks: list[dict[str, object]] = []
    for step in range(1, steps + 1):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.append(StepValues(loss=outcome.loss, grad_norm=outcome.grad_norm, lr=outcome.lr))
        # Weights after every step find the first deviation; state after the last is enough.
        for name, box, values in _blocks(parts, with_state=step == steps):
            arrays[str(len(blocks))] = values
            blocks.append({"step": step, "name": name, "box": asdict(box)})
    # evaluation of the trained weights; on one rank also a second way
    eval_loss = evaluate(parts).get("eval/loss")
    is_reference = parts.plan.grid.world_size == 1
    index = {
        "curve": [asdict(values) for values in curve],
        "eval_loss": eval_loss,
        "plain_eval_loss": plain_eval_loss(parts) if is_reference else None,
        "blocks": blocks,
        "lr_scales": {
            block.tensor.name: rates_of(block.tensor, job.optimizer, job.model).lr_scale
            for block in parts.optimizer.values()
            if block.kind == "model" and block.tensor.is_trained
        },
        "router_margin": parts.routers.smallest_margin,
        "fp8_margin": min(module.fp8.margin.smallest for module in parts.modules),
    }
    with result_path(folder, rank).open("wb") as file:
        np.savez(file, index=np.array(json.dumps(index)), **arrays)


def _blocks(parts: TrainingComponents, *, with_state: bool) -> list[tuple[str, Box, np.ndarray]]:
    """Return this rank's masters, and ``with_state`` its optimizer state too, by name."""
    return [
        (block.name if block.kind != "model" else block.tensor.name, block.box, _copy(block.values))
        for block in parts.optimizer.values()
        if with_state or block.kind == "model"
    ]


def _copy(values: torch.Tensor) -> np.ndarray:
    return values.numpy().copy()
