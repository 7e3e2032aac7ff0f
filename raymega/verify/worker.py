"""Rank of a verified layout: trains some steps, evaluates, and writes its numbers to a file.

It assembles its components with `train/build.py`, as a real run does. Only this module and the fork
server import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raymega.box import Box
from raymega.checkpoint.format.manifest import Manifest
from raymega.checkpoint.load.reader import load
from raymega.checkpoint.save.writer import CheckpointWriter
from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.errors import CheckpointError
from raymega.evaluate.requests import Request
from raymega.evaluate.worker import score_requests
from raymega.messages import Requests, ShardSaved
from raymega.optim.param_groups import rates_of
from raymega.parallel.comm.process_groups import Groups, groups_of_plan
from raymega.parallel.comm.world import close_world, file_store, open_world
from raymega.plan.run_plan import RunPlan, read_plan
from raymega.storage.registry import open_store
from raymega.train.build import TrainingComponents, build_parts
from raymega.train.build_scorer import build_scorer, load_weights, scorer_of
from raymega.train.environment import prepare_process
from raymega.train.evaluation.average import evaluate_average
from raymega.train.forward_backward import evaluate
from raymega.train.state import TrainState, first_state, state_from
from raymega.train.step import StepOutcome, train_step
from raymega.verify.compare import EVAL_EMA_LOSS, EVAL_LOSS, StepValues
from raymega.verify.plain_evaluation import plain_eval_losses
from raymega.verify.results import result_path
from raymega.verify.tasks import TASK_SCORES, compared_number, drawn_requests, is_beside

CPU = "cpu"
COMPARED = {
    "loss": EVAL_LOSS, "set_loss": EVAL_LOSS, "ema_loss": EVAL_EMA_LOSS, "set_ema_loss": EVAL_EMA_LOSS,
}  # fmt: skip
"""Names in a comparison of the metrics of an evaluation, by short name."""


def train_rank(  # noqa: PLR0913  # the fork server is the one place that calls it
    rank: int,
    plan_json: str,
    folder: Path,
    *,
    steps: int,
    timeout_s: float,
    save_to: str = "",
    restore: str = "",
) -> None:
    """Train rank ``rank`` of the plan in a world of its own to step ``steps``, and save its numbers.

    Args:
        rank: Global rank.
        plan_json: Plan of the run.
        folder: Folder of the results.
        steps: Number of steps, those before the checkpoint included.
        timeout_s: Longest wait for other ranks in seconds.
        save_to: Store to which the state after the last step is saved; empty saves nothing.
        restore: URI of the checkpoint to start from; empty starts at step 0.
    """
    plan = read_plan(plan_json)
    with _world(plan, rank, folder, timeout_s) as (groups, device):
        # build, restore, train, save
        parts = build_parts(plan, rank=rank, groups=groups, device=device)
        for module in parts.modules:
            # Margins of fp8 roundings matter for the reference alone.
            module.fp8.margin.is_watched = plan.grid.world_size == 1
        state = first_state(plan.job.precision)
        if restore:
            state = _restore(parts, open_checkpoint(restore))
        state, index, arrays = _train(parts, state, steps)
        if save_to:
            index["manifest"] = _save(parts, state, save_to, rank)
        with result_path(folder, rank).open("wb") as file:
            np.savez(file, index=np.array(json.dumps(index)), **arrays)
        parts.weights.wait_for_all()


def score_rank(rank: int, plan_json: str, folder: Path, *, timeout_s: float, restore: str) -> None:
    """Score the drawn requests with a checkpoint's weights, as workers beside a run do, and write the number.

    Args:
        rank: Global rank.
        plan_json: Plan of the evaluation.
        folder: Folder of the results.
        timeout_s: Longest wait for other ranks in seconds.
        restore: URI of the checkpoint.
    """
    plan = read_plan(plan_json)
    with _world(plan, rank, folder, timeout_s) as (groups, device):
        scorer = build_scorer(plan, rank=rank, groups=groups, device=device)
        load_weights(scorer, open_checkpoint(restore), groups)
        log_probs, _ = score_requests(plan, scorer, groups, _requests(plan), device=device)
        index = {"eval_losses": {TASK_SCORES: compared_number(log_probs)}}
        with result_path(folder, rank).open("wb") as file:
            np.savez(file, index=np.array(json.dumps(index)))


@contextmanager
def _world(
    plan: RunPlan, rank: int, folder: Path, timeout_s: float
) -> Iterator[tuple[Groups, torch.device]]:
    """Open a world of the plan's ranks for the body; yield this rank's process groups and its device."""
    device = torch.device(CPU)
    if plan.job.cluster.device != CPU:
        device = prepare_process(plan, device=plan.job.cluster.device, local_rank=rank)
    # All ranks share this machine's cores.
    torch.set_num_threads(1)
    world_size = plan.grid.world_size
    if world_size > 1:
        open_world(
            rank=rank,
            world_size=world_size,
            rendezvous="",
            store=file_store(folder / "store", world_size),
            timeout_s=timeout_s,
            device=device,
        )
    yield groups_of_plan(plan, rank, timeout_s=timeout_s), device
    close_world()


def _train(
    parts: TrainingComponents, state: TrainState, steps: int
) -> tuple[TrainState, dict[str, Any], dict[str, Any]]:
    """Train to step ``steps`` and evaluate; return the state, scalars as JSON, and arrays by number."""
    job, curve, first_step = parts.plan.job, [], state.step + 1
    arrays: dict[str, Any] = {}
    blocks: list[dict[str, object]] = []
    for step in range(first_step, steps + 1):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.append(_values(outcome))
        # weights and optimizer state after every step, to find the first deviation
        for name, box, values in _blocks(parts):
            arrays[str(len(blocks))] = values
            blocks.append({"step": step, "name": name, "box": asdict(box)})
    # evaluation of the trained weights; on one rank with the whole model also a second way
    is_alone = parts.plan.grid.world_size == 1 and len(parts.modules) == 1
    is_reference = is_alone and parts.device.type == CPU
    index = {
        "first_step": first_step,
        "curve": [asdict(values) for values in curve],
        "eval_losses": _eval_losses(parts),
        "plain_eval_losses": plain_eval_losses(parts) if is_reference else {},
        "blocks": blocks,
        "lr_scales": {
            block.tensor.name: rates_of(block.tensor, job.optimizer, job.model).lr_scale
            for block in parts.optimizer.values()
            if block.kind == "model" and block.tensor.is_trained
        },
        "router_margin": parts.routers.smallest_margin,
        "fp8_margin": min(module.fp8.margin.smallest for module in parts.modules),
    }
    return state, index, arrays


def _values(outcome: StepOutcome) -> StepValues:
    return StepValues(
        loss=outcome.loss, grad_norm=outcome.grad_norm, lr=outcome.lr, tokens=outcome.tokens,
        mtp_loss=outcome.mtp_loss, pair_loss=outcome.pair_loss,
        loads={
            str(layer): [*load.counts.tolist(), load.tokens, load.kept, load.entropy, load.balance, load.z]
            for layer, load in outcome.loads.items()
        },
    )  # fmt: skip


def _eval_losses(parts: TrainingComponents) -> dict[str, float]:
    """Return the held-out losses by their names in a comparison."""
    losses: dict[str, float] = {}
    for name, loss in (evaluate(parts) | evaluate_average(parts)).items():
        _, short, *of_set = name.split("/", 2)
        if compared := COMPARED.get(short):
            losses["/".join((compared, *of_set))] = loss
    # tasks on this grid; those beside a run are scored by `score_rank`
    if parts.plan.job.run.eval_tasks and not is_beside(parts.plan.job):
        scorer, requests = scorer_of(parts, lambda: None), _requests(parts.plan)
        log_probs, _ = score_requests(
            parts.plan, scorer, parts.groups, requests, device=parts.device
        )
        losses[TASK_SCORES] = compared_number(log_probs)
    return losses


def _requests(plan: RunPlan) -> list[Request]:
    return drawn_requests(seq_len=plan.job.data.seq_len, vocab_size=plan.job.model.vocab_size)


def _save(parts: TrainingComponents, state: TrainState, uri: str, rank: int) -> str:
    """Write this rank's share of a checkpoint; return a manifest of it alone, which no store has."""
    shards: list[ShardSaved] = []
    writer = CheckpointWriter(
        open_store(uri), rank=rank, attempt=1,
        report=lambda told: shards.append(told) if isinstance(told, ShardSaved) else None,
    )  # fmt: skip
    writer.save(state.step, list(parts.optimizer.blocks()), state.scalars())
    if not writer.wait() or shards[-1].error:
        raise CheckpointError(
            f"rank {rank} saved nothing: {shards[-1].error if shards else 'late'}"
        )
    plan = parts.plan
    mine = Manifest(
        step=state.step, attempt=1, created="", state=shards[-1].state,
        job=plan.job.model_dump(mode="json"), grid=asdict(plan.grid), metrics={}, boxes=shards[-1].boxes,
    )  # fmt: skip
    return mine.to_json()


def _restore(parts: TrainingComponents, checkpoint: Checkpoint) -> TrainState:
    """Load a checkpoint of any grid, and return the state of its run."""
    store, manifest = checkpoint
    load(store, manifest, list(parts.optimizer.blocks()))
    parts.optimizer.sync_weights()
    return state_from(manifest.state, parts.plan.job.precision)


def _blocks(parts: TrainingComponents) -> list[tuple[str, Box, np.ndarray]]:
    """Return this rank's masters and optimizer state by name."""
    return [
        (
            block.name if block.kind != "model" else block.tensor.name,
            block.box,
            block.values.cpu().numpy().copy(),
        )
        for block in parts.optimizer.values()
    ]
