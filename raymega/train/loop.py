"""The training loop in plain view: step, report, evaluate, save, and stop when asked.

It decides when; the parts know how. It never retries and never decides to resume.
"""

from __future__ import annotations

import time
from dataclasses import replace

from raymega.config.schema import Job
from raymega.data.dynamic_loader import DynamicLoader
from raymega.messages import (
    Channel,
    Evaluated,
    MemoryMeasured,
    Progress,
    StepDone,
    TimelineRecorded,
    WorkerFinished,
)
from raymega.optim.param_groups import role_rates
from raymega.parallel.comm import barrier
from raymega.schedule.timeline import BETWEEN_CP, BETWEEN_EXPERTS
from raymega.train.build import Parts
from raymega.train.evaluate import evaluate
from raymega.train.expert_load import expert_metrics, expert_report
from raymega.train.meters import Speedometer, memory_metrics, reset_peak_memory
from raymega.train.saving import Saving
from raymega.train.state import TrainState
from raymega.train.statistics import Activations, activations_of, norm_metrics
from raymega.train.step import StepOutcome, train_step


def run_loop(
    parts: Parts, state: TrainState, *, channel: Channel, saving: Saving, rank: int
) -> TrainState:
    """Train from ``state`` to the job's last step, or until the driver asks to stop."""
    job = parts.plan.job
    source = parts.loader.source
    speed = Speedometer(parts.plan, parts.device, context=source.context)
    packing = {"data/packing_efficiency": source.efficiency} if job.data.packing != "none" else {}
    reset_peak_memory(parts.device)
    first_step, stopped = state.step + 1, False
    while state.step < job.run.steps and not stopped:
        is_recording = _is_due(state.step + 1, job.tracking.timeline_every)
        if is_recording:
            barrier(parts.groups.world)
        watches_activations = _is_due(state.step + 1, job.tracking.activations_every)
        with activations_of(parts, is_due=watches_activations) as activations:
            began = time.monotonic()
            wishes = channel.requests()
            outcome = train_step(
                parts,
                state,
                replace(wishes, save=wishes.save and rank == 0),
                is_recording=is_recording,
                summed=saving.summed(),
                before_update=saving.fence,
            )
            seconds = time.monotonic() - began
        metrics = speed.metrics(tokens=outcome.tokens, seconds=seconds)
        metrics |= _sent_bytes(parts)
        if isinstance(parts.loader, DynamicLoader):
            metrics |= parts.loader.metrics()
        metrics |= packing | _statistics(parts, state, outcome, activations)
        metrics |= expert_metrics(outcome.loads) | _rates(outcome.lr, job)
        state = outcome.state
        metrics |= saving.observe(outcome)
        _report_step(channel, rank, outcome, metrics)
        if state.step == first_step or _is_due(state.step, job.tracking.console_every):
            memory = memory_metrics(parts.device)
            channel.report(MemoryMeasured(rank=rank, step=state.step, metrics=memory))
            if rank == 0 and outcome.loads:
                channel.report(expert_report(outcome.loads, rank=rank, step=state.step))
        stopped = outcome.stop

        is_last = stopped or state.step == job.run.steps
        if state.step == job.run.steps or _is_due(state.step, job.run.eval_every):
            _report_evaluation(channel, rank, state.step, evaluate(parts))
        saving.save_what_is_due(outcome, is_last=is_last)
    parts.weights.wait_for_all()
    saving.wait()
    channel.report(WorkerFinished(rank=rank, step=state.step, stopped=stopped))
    return state


def _sent_bytes(parts: Parts) -> dict[str, float]:
    """What activations that travelled in the step took, where any do."""
    parallel, log = parts.plan.job.parallel, parts.comm_log
    metrics: dict[str, float] = {}
    if parallel.cp > 1 or parallel.dynamic_cp:
        metrics["comm/cp_sent_bytes"] = float(log.sent_bytes(BETWEEN_CP))
    if parallel.ep * parallel.etp > 1:
        metrics["comm/experts_sent_bytes"] = float(log.sent_bytes(BETWEEN_EXPERTS))
    return metrics


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _statistics(
    parts: Parts, before: TrainState, outcome: StepOutcome, activations: Activations | None
) -> dict[str, float]:
    """What is due; a step that was skipped for an overflow has none worth looking at."""
    metrics: dict[str, float] = {}
    if outcome.is_skipped:
        return metrics
    if activations is not None:
        metrics |= activations.metrics(before, outcome)
    if _is_due(outcome.state.step, parts.plan.job.tracking.norms_every):
        metrics |= norm_metrics(parts, outcome)
    return metrics


def _report_step(
    channel: Channel, rank: int, outcome: StepOutcome, others: dict[str, float]
) -> None:
    step = outcome.state.step
    if outcome.events:
        channel.report(TimelineRecorded(rank=rank, step=step, events=outcome.events))
    if rank != 0:
        channel.report(Progress(rank=rank, step=step))
        return
    metrics = _step_metrics(outcome)
    channel.report(StepDone(rank=rank, step=step, metrics=metrics | others))


def _step_metrics(outcome: StepOutcome) -> dict[str, float]:
    state = outcome.state
    metrics = {
        "train/loss": outcome.loss,
        "train/grad_norm": outcome.grad_norm,
        "train/lr": outcome.lr,
        "train/global_batch_size": float(outcome.samples),
        "train/tokens": float(state.tokens),
        "train/samples": float(state.samples),
    }
    if outcome.mtp_loss is not None:
        metrics["train/mtp_loss"] = outcome.mtp_loss
    if state.loss_scale is not None:
        metrics["train/loss_scale"] = state.loss_scale.factor
        metrics["train/skipped_steps"] = float(state.skipped_steps)
    return metrics


def _rates(lr: float, job: Job) -> dict[str, float]:
    """Of roles that have rates of their own."""
    scales = role_rates(job.optimizer, job.model)
    return {f"train/role_lr/{role}": lr * scale for role, scale in scales.items()}


def _report_evaluation(channel: Channel, rank: int, step: int, metrics: dict[str, float]) -> None:
    if rank == 0 and metrics:
        channel.report(Evaluated(rank=rank, step=step, metrics=metrics))
