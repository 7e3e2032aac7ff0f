"""The same kill under Ray Train: a TorchTrainer whose FailureConfig starts the group again from a checkpoint.

The loop is the shortest that trains the same model on dp ranks and loses one step at most: DistributedDataParallel,
torch's AdamW, and a checkpoint of rank 0 reported with every step.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import torch

from raymega.config.parallel import ParallelSection
from raymega.plan.run_plan import RunPlan, make_plan, read_plan

CALM_STEPS = 5
PATIENCE_S = 180.0
TICK_S = 0.01
SETTLE_S = 1.0
"""Survivors may still finish the step that they were in; a new group takes longer than this to load torch."""


def kills_under_ray_train(plan: RunPlan, folder: str, *, kills: int) -> Iterator[float]:
    """Kill one worker after the other, and yield the seconds from SIGKILL to the next finished step."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    notes = Path(folder) / "notes"
    notes.mkdir()
    trainer = TorchTrainer(
        train,
        train_loop_config={"plan": plan.to_json(), "notes": str(notes)},
        scaling_config=ScalingConfig(
            num_workers=plan.grid.world_size, resources_per_worker={"CPU": 1}
        ),
        run_config=RunConfig(
            name="ray-train",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=kills + 1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    thread = Thread(target=trainer.fit, daemon=True)
    thread.start()
    try:
        for number in range(kills):
            # kill only after some undisturbed steps, as on the other side
            first = _wait_for(notes, since_s=time.monotonic())[0]
            while _last(notes)[0] < first + CALM_STEPS:
                time.sleep(TICK_S)
            pids = json.loads((notes / "pids.json").read_text())
            killed_s = time.monotonic()
            os.kill(pids[(number + 1) % len(pids)], signal.SIGKILL)
            _, at_s = _wait_for(notes, since_s=killed_s + SETTLE_S)
            yield at_s - killed_s
    finally:
        (notes / "stop").touch()
        thread.join(PATIENCE_S)


def train(config: dict[str, str]) -> None:
    """Train in a worker of TorchTrainer; after a failure it restarts from the newest checkpoint."""
    import ray.train
    import torch.distributed as dist
    from ray.train.torch import prepare_model

    torch.set_num_threads(1)
    rank, notes = dist.get_rank(), Path(config["notes"])
    plan = read_plan(config["plan"])
    module = prepare_model(_module(plan))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    # start anew, or from what the last report kept
    step = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    # the killer reads the pids of the newest group
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        (notes / "pids.json").write_text(json.dumps(pids))
    while not (notes / "stop").exists():
        _train_step(plan, module, optimizer, seed=step * len(pids) + rank)
        step += 1
        if rank == 0:
            _note(notes, step)
        # a checkpoint of every step, so that at most one step is lost, as with snapshots
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                state = {
                    "model": module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                torch.save(state, Path(folder) / "state.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step}, checkpoint=checkpoint)


def _module(plan: RunPlan) -> torch.nn.Module:
    """The job's whole model on one rank."""
    from raymega.model.pipeline_stage import StageModule
    from raymega.parallel.comm.process_groups import build_groups
    from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel

    # DistributedDataParallel wants the whole model on every rank
    one = make_plan(plan.job.model_copy(update={"parallel": ParallelSection()}))
    groups = build_groups(one.grid, 0, timeout_s=60.0)
    return StageModule(
        one.job.model,
        one.stages[0],
        sp=SequenceParallel(tp=groups.tp, is_sequence_parallel=False),
        dtype=torch.float64,
        device=torch.device("cpu"),
        seed=one.job.run.seed,
    )


def _train_step(
    plan: RunPlan, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, seed: int
) -> None:
    """Train one step on this rank's part of a global batch of random tokens."""
    job, draw = plan.job, torch.Generator().manual_seed(seed)
    shape = (plan.batch.micro_batch_size, job.data.seq_len)
    for _ in range(plan.batch.num_micro_batches):
        tokens = torch.randint(job.model.vocab_size, shape, generator=draw)
        mask = torch.ones(shape)
        (module(tokens, tokens, mask, None) / mask.numel()).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _note(notes: Path, step: int) -> None:
    """A step is done; torn lines there are none, for a rename is whole or not at all."""
    path = notes / "last.new"
    path.write_text(json.dumps([step, time.monotonic()]))
    path.rename(notes / "last.json")


def _last(notes: Path) -> tuple[int, float]:
    """The newest step that was done, and when."""
    try:
        step, at_s = json.loads((notes / "last.json").read_text())
    except FileNotFoundError:
        return 0, 0.0
    return step, at_s


def _wait_for(notes: Path, *, since_s: float) -> tuple[int, float]:
    """The first step seen that was done after ``since_s``, and when it was.

    Raises:
        TimeoutError: None came.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        step, at_s = _last(notes)
        if at_s > since_s:
            return step, at_s
        time.sleep(TICK_S)
    raise TimeoutError(f"no step in {PATIENCE_S:g} s")
