"""The training loop: step, report, evaluate, save, and stop when the driver asks.

The loop decides when each happens. It never retries and never resumes: the driver starts a new
attempt for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from raymega.checkpoint.load.held_state import HELD
from raymega.config.schema import Job
from raymega.data.dynamic_loader import DynamicLoader
from raymega.events import EvaluationFinished, StepFinished
from raymega.messages import (
    Channel,
    Progress,
    RankMemory,
    RankTimeline,
    Requests,
    WorkerFinished,
)
from raymega.optim.param_groups import role_rates
from raymega.parallel.comm.collectives import barrier
from raymega.schedule.timeline import BETWEEN_CP, BETWEEN_EXPERTS, IN_UPDATE
from raymega.train.build import TrainingComponents
from raymega.train.evaluation.average import evaluate_average
from raymega.train.forward_backward import evaluate
from raymega.train.plugin_hooks import PluginHooks
from raymega.train.replica_divergence import DivergenceCheck
from raymega.train.run_samples import RunSampler
from raymega.train.save_schedule import SaveScheduler
from raymega.train.state import TrainState
from raymega.train.step import StepOutcome, train_step
from raymega.train.throughput import (
    BusyTimeMeter,
    ThroughputMeter,
    memory_metrics,
    reset_peak_memory,
)
from raymega.train.train_statistics import (
    Activations,
    activations_of,
    expert_loads,
    expert_metrics,
    norm_metrics,
)


def run_loop(  # noqa: PLR0913  # the entry is the one place that calls it
    parts: TrainingComponents,
    state: TrainState,
    *,
    channel: Channel,
    save_scheduler: SaveScheduler,
    rank: int,
    skipped_samples: Sequence[tuple[int, int]] = (),
    is_evaluation_due: bool = False,
    evaluate_tasks: Callable[[int], None] | None = None,
) -> TrainState:
    """Train from ``state`` to the job's last step, or until the driver asks to stop.

    ``skipped_samples`` are ranges (first, end) of global samples to leave out; see StartWorker.
    ``is_evaluation_due`` is for a state whose evaluation a lost rank has cut off.
    ``evaluate_tasks`` scores the run's evaluation tasks after a step, on all ranks; None for none.
    """
    job = parts.plan.job
    speed = ThroughputMeter(parts.plan, parts.device, parts.loader.source)
    sampler, hooks = RunSampler(parts, channel, rank), PluginHooks(parts.plan, parts.groups.world)
    check, tell_evaluation, work = (
        DivergenceCheck(parts),
        partial(_report_evaluation, channel, rank, hooks),
        BusyTimeMeter(parts.device, parts.groups.world.waited, parts.passes),
    )
    reset_peak_memory(parts.device)
    first_step, stopped = state.step + 1, False
    if is_evaluation_due:
        _evaluate_when_due(parts, save_scheduler, state.step, tell_evaluation, evaluate_tasks)
    while state.step < job.run.steps and not stopped:
        # prepare: skip bad samples, decide what to record
        state = state.past(skipped_samples)
        is_recording = _is_due(state.step + 1, job.tracking.timeline_every)
        # Ranks start together, so that their time lines share a zero.
        if is_recording:
            barrier(parts.groups.world)
        watches_activations = _is_due(state.step + 1, job.tracking.activations_every)
        hooks.step_begins(state.step + 1)
        # the step itself, with the driver's requests in its all-reduce
        with activations_of(parts, is_due=watches_activations) as activations, work:
            began = time.monotonic()
            requests = _requests_of(channel, rank)
            outcome = _do_step(parts, state, requests, save_scheduler, is_recording=is_recording)
            seconds = time.monotonic() - began
        # metrics of the step; all ranks collect them, as some need collectives
        metrics = speed.metrics(
            samples=outcome.samples,
            seconds=seconds,
            image_tokens=outcome.image_tokens,
            images=outcome.images,
        )
        metrics |= (
            _data_metrics(parts, outcome.state, job)
            | _sent_bytes(parts)
            | _statistics(parts, state, outcome, activations)
        )
        metrics |= expert_metrics(outcome.loads) | _rates(outcome.lr, job)
        # advance, and check replicas before anything is saved
        state, stopped = outcome.state, outcome.stop or outcome.regroup
        is_last = outcome.stop or state.step == job.run.steps
        metrics |= save_scheduler.observe(outcome, is_last=is_last)
        is_saving = save_scheduler.is_checkpoint_due(outcome, is_last=is_last)
        metrics |= check.check(state.step, is_saving=is_saving)
        # report
        _report_step(channel, rank, outcome, metrics, hooks)
        if state.step == first_step or _is_due(state.step, job.tracking.console_every):
            _report_rank(channel, rank, outcome, memory_metrics(parts.device) | work.pop_metrics())
        # evaluate and save
        _evaluate_when_due(parts, save_scheduler, state.step, tell_evaluation, evaluate_tasks)
        sampler.report_when_due(state.step)
        save_scheduler.save_what_is_due(outcome, is_last=is_last)
        hooks.checkpoint_begins(state.step, is_due=is_saving)
        HELD.is_finished = True
    # end: no collective and no save may be pending when the worker reports that it finished
    parts.weights.wait_for_all()
    save_scheduler.wait()
    channel.report(WorkerFinished(rank=rank, step=state.step, stopped=stopped))
    return state


def _requests_of(channel: Channel, rank: int) -> Requests:
    """Return the driver's requests to this rank; ranks hear of one at different steps, so rank 0's alone counts."""
    requests, is_first = channel.requests(), rank == 0
    return replace(requests, save=requests.save and is_first, regroup=requests.regroup and is_first)


def _do_step(
    parts: TrainingComponents,
    state: TrainState,
    requests: Requests,
    save_scheduler: SaveScheduler,
    *,
    is_recording: bool,
) -> StepOutcome:
    """Make a step, after which this process holds the state that it led to."""

    def before_update() -> None:
        HELD.changing()
        save_scheduler.fence()

    outcome = train_step(
        parts,
        state,
        requests,
        is_recording=is_recording,
        extra_reductions=save_scheduler.extra_reductions(),
        before_update=before_update,
    )
    if HELD.blocks:  # rank 0 may be lost before it reports this step
        report = StepFinished(step=outcome.state.step, metrics=_step_metrics(outcome))
        HELD.completed(report, outcome.state.scalars())
    return outcome


def _evaluate_when_due(
    parts: TrainingComponents,
    save_scheduler: SaveScheduler,
    step: int,
    tell: Callable[[int, dict[str, float]], None],
    evaluate_tasks: Callable[[int], None] | None,
) -> None:
    """Evaluate on held-out text and on the run's tasks, each at its steps and at the last one."""
    run = parts.plan.job.run
    is_last = step == run.steps
    if is_last or _is_due(step, run.eval_every):
        tell(step, _evaluate(parts, save_scheduler))
    if evaluate_tasks and (is_last or _is_due(step, run.eval_tasks_every)):
        evaluate_tasks(step)


def _evaluate(parts: TrainingComponents, save_scheduler: SaveScheduler) -> dict[str, float]:
    """Return the metrics of held-out text, of the weights and of their average if the job asks for it."""
    metrics = evaluate(parts)
    if metrics and parts.plan.job.run.eval_ema:
        # saves copy the masters, and a next attempt continues with them: the average takes their place for a while
        save_scheduler.fence()
        with HELD.borrowed(lambda: parts.optimizer.holds_masters):
            metrics |= evaluate_average(parts)
    return metrics


def _sent_bytes(parts: TrainingComponents) -> dict[str, float]:
    """Return the bytes sent in the step: by cp, by experts, and by the optimizer's update."""
    parallel, log = parts.plan.job.parallel, parts.comm_log
    metrics: dict[str, float] = {}
    if parallel.cp > 1 or parallel.dynamic_cp:
        metrics["comm/cp_sent_bytes"] = float(log.sent_bytes(BETWEEN_CP))
    if parallel.ep * parallel.etp > 1:
        metrics["comm/experts_sent_bytes"] = float(log.sent_bytes(BETWEEN_EXPERTS))
    if sent := log.sent_bytes(IN_UPDATE):
        metrics["comm/update_sent_bytes"] = float(sent)
    return metrics


def _data_metrics(parts: TrainingComponents, after: TrainState, job: Job) -> dict[str, float]:
    """Return what the run has read of each dataset, the padding of rows, and the balance of dynamic cp."""
    metrics: dict[str, float] = {}
    # The datasets of a blend, as often as the console shows a step.
    samples, is_last = parts.loader.source, after.step == job.run.steps
    if len(samples.mixture.names) > 1 and (
        is_last or _is_due(after.step, job.tracking.console_every)
    ):
        for name, (count, epochs) in samples.epochs(after.samples).items():
            metrics[f"data/source_tokens/{name}"] = float(count * samples.seq_len)
            metrics[f"data/source_epochs/{name}"] = epochs
    if parts.plan.job.data.packing != "none":
        metrics["data/packing_efficiency"] = parts.loader.source.efficiency
    if isinstance(parts.loader, DynamicLoader):
        metrics |= parts.loader.metrics()
    # shards from object stores
    if samples.fetcher:
        use = samples.fetcher.use()
        metrics |= {
            "data/wait_s": parts.loader.waited_s,
            "data/fetched_bytes": float(use.fetched_bytes),
            "data/cache_hits": float(use.hits),
            "data/cache_misses": float(use.misses),
        }
    return metrics


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _statistics(
    parts: TrainingComponents,
    before: TrainState,
    outcome: StepOutcome,
    activations: Activations | None,
) -> dict[str, float]:
    """Return the statistics due at this step; none where the step was skipped."""
    metrics: dict[str, float] = {}
    if outcome.is_skipped:
        return metrics
    if activations is not None:
        metrics |= activations.metrics(before, outcome)
    if _is_due(outcome.state.step, parts.plan.job.tracking.norms_every):
        metrics |= norm_metrics(parts, outcome)
    return metrics


def _report_step(
    channel: Channel,
    rank: int,
    outcome: StepOutcome,
    others: dict[str, float],
    hooks: PluginHooks,
) -> None:
    """Report the step's metrics, and tell plug-ins, which may add to them."""
    step = outcome.state.step
    metrics = _step_metrics(outcome) | others
    metrics |= hooks.metrics(step, metrics)
    HELD.report = StepFinished(step=step, metrics=metrics)
    hooks.step_ends(step, metrics)
    if outcome.events:
        channel.report(RankTimeline(rank=rank, step=step, events=outcome.events))
    # Other ranks only show that they are alive: metrics are equal on all ranks.
    if rank != 0:
        channel.report(Progress(rank=rank, step=step))
        return
    if outcome.bad_step is not None:
        channel.report(outcome.bad_step)
    channel.report(StepFinished(step=step, metrics=metrics))


def _report_rank(channel: Channel, rank: int, outcome: StepOutcome, own: dict[str, float]) -> None:
    """Report the rank's own measurements, and from rank 0 the tokens of all experts."""
    channel.report(RankMemory(rank=rank, step=outcome.state.step, metrics=own))
    if rank == 0 and outcome.loads:
        channel.report(expert_loads(outcome.loads, step=outcome.state.step))


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
    # pairs of answers have rewards beside their accuracy, a teacher has a divergence, classes have the accuracy alone
    groups = {"chosen_reward": "preference", "cross_entropy": "distillation"}
    of_pairs = next((groups[name] for name in outcome.pair_means if name in groups), "head")
    metrics |= {f"{of_pairs}/{name}": mean for name, mean in outcome.pair_means.items()}
    if outcome.mtp_loss is not None:
        metrics["train/mtp_loss"] = outcome.mtp_loss
    if outcome.pair_loss is not None:
        metrics["train/pair_loss"] = outcome.pair_loss
    if state.loss_scale is not None:
        metrics["train/loss_scale"] = state.loss_scale.factor
    if state.loss_scale is not None or state.skipped_steps:
        metrics["train/skipped_steps"] = float(state.skipped_steps)
    return metrics


def _rates(lr: float, job: Job) -> dict[str, float]:
    """Return the learning rate of each role with its own rate (embeddings, matrices, ...)."""
    scales = role_rates(job.optimizer, job.model)
    return {f"train/role_lr/{role}": lr * scale for role, scale in scales.items()}


def _report_evaluation(
    channel: Channel, rank: int, hooks: PluginHooks, step: int, metrics: dict[str, float]
) -> None:
    """Report the metrics of held-out text, and tell plug-ins; nothing where the job evaluates none."""
    if rank == 0 and metrics:
        channel.report(EvaluationFinished(step=step, metrics=metrics))
    if metrics:
        hooks.evaluation_ends(step, metrics)
