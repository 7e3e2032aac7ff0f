"""Table of all metrics of a run: name, unit, kind and help line, and which event carries which metric.

Console, JSON lines, MLflow, Prometheus and dashboards derive from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from raymega.errors import InternalError
from raymega.events import (
    AttemptStarted,
    CheckpointCommitted,
    Measured,
    Recovered,
    RunEvent,
    RunFinished,
    RunStarted,
    SaveProgress,
    StepFinished,
    WorkersStarted,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Row of the table: a gauge holds a current value, a counter a total that only rises.

    Attributes:
        name: Full name, family first: ``train/loss``.
        unit: Unit of its values; ``1`` for ratios and counts without one.
        kind: Type of the metric, in Prometheus' terms.
        help: Description in one sentence, shown by Prometheus and the dashboard.
        is_per_rank: Whether each rank has a value of its own, under the label ``rank``.
        part: Kind of model part that has a value of its own, such as ``layer``; empty for a metric without
            parts. Names are then ``name/part``, as ``train/output_std/3``; in Prometheus the part is a label.
        of: Part of this row, such as ``3``; empty in the table itself.
    """

    name: str
    unit: str
    kind: Literal["gauge", "counter"]
    help: str
    is_per_rank: bool = False
    part: str = ""
    of: str = ""

    @property
    def short_name(self) -> str:
        """Return the name without its family, which is the key in JSON lines: ``loss`` of ``train/loss``."""
        name = self.name.partition("/")[2]
        return f"{name}/{self.of}" if self.of else name

    @property
    def prometheus_name(self) -> str:
        """Return the name for Prometheus, ``raymega_train_loss``, to which Ray adds the prefix ``ray_``."""
        return "raymega_" + self.name.replace("/", "_")


def _gauge(name: str, unit: str, help_line: str) -> Metric:
    return Metric(name=name, unit=unit, kind="gauge", help=help_line)


def _rank_gauge(name: str, unit: str, help_line: str) -> Metric:
    return Metric(name=name, unit=unit, kind="gauge", help=help_line, is_per_rank=True)


def _part_gauge(name: str, part: str, unit: str, help_line: str) -> Metric:
    return Metric(name=name, unit=unit, kind="gauge", help=help_line, part=part)


def _counter(name: str, unit: str, help_line: str) -> Metric:
    return Metric(name=name, unit=unit, kind="counter", help=help_line)


TASK_METRIC = "eval/task"

METRICS = (
    # loss, gradient and learning rate
    _gauge("train/loss", "nats", "Mean cross entropy of the step's unmasked tokens, mixed with a teacher's divergence, or mean loss of its pairs."),
    _gauge("train/mtp_loss", "nats",
           "Mean cross entropy of the multi-token prediction heads, mean over depths; MTP only."),
    _gauge("train/pair_loss", "nats", "Mean cross entropy of an encoder's pairs of segments."),
    _gauge("preference/chosen_reward", "1",
           "Mean reward of chosen answers: beta times the log-ratio to the reference; preference training only."),
    _gauge("preference/rejected_reward", "1", "Mean reward of rejected answers; preference training only."),
    _gauge("preference/accuracy", "1",
           "Share of pairs whose chosen answer has the larger reward; preference training only."),
    _gauge("distillation/divergence", "nats",
           "Mean divergence from the teacher, by distillation.loss_type at its temperature; distillation only."),
    _gauge("distillation/cross_entropy", "nats",
           "Mean cross entropy of the labels, the other part of train/loss; distillation only."),
    _gauge("head/accuracy", "1", "Share of documents, questions or tokens whose class has the largest score; heads only."),
    _gauge("preference/divergence", "nats",
           "Estimate of the divergence from the reference on answers to other prompts; kto only."),
    _gauge("train/grad_norm", "1", "L2 norm of the whole gradient, before clipping."),
    _gauge("train/lr", "1", "Learning rate of the step."),
    _part_gauge("train/role_lr", "role", "1",
                "Learning rate of embeddings, output head and last block, where it differs from train/lr."),
    _gauge("train/global_batch_size", "sequences", "Sequences of the step, all ranks."),
    _gauge("train/loss_scale", "1", "Loss scale of the next step; float16 only."),
    # steps that changed no weight
    _counter("train/skipped_steps", "steps", "Steps without an update, for an overflow or a bad batch."),
    # datasets of a blend
    _part_gauge("data/source_tokens", "dataset", "tokens",
                "Tokens read of a blend's dataset since the run began, padding included."),
    _part_gauge("data/source_epochs", "dataset", "1", "Passes over a blend's dataset since the run began."),
    # shards of datasets in object stores
    _gauge("data/wait_s", "s", "Time rank 0 waited for the step's input; datasets in object stores only."),
    _counter("data/fetched_bytes", "bytes", "Bytes of shards that rank 0's node fetched in this attempt."),
    _counter("data/cache_hits", "shards", "Shards that rank 0 opened without a wait."),
    _counter("data/cache_misses", "shards", "Shards that rank 0 waited for."),
    # packed documents and dynamic context parallelism
    _gauge("data/packing_efficiency", "1", "Share of the tokens of packed rows that are not padding."),
    _gauge("data/imbalance", "1",
           "Planned work of the busiest rank over the mean of ranks; dynamic cp only."),
    _gauge("data/micro_batches", "1", "Micro-batches of the step; dynamic cp only."),
    _gauge("data/pack_ranks", "ranks", "Ranks that share a pack, mean over tokens; dynamic cp only."),
    _gauge("data/most_pack_ranks", "ranks", "Largest number of ranks that share a pack; dynamic cp only."),
    _gauge("data/schedule_wait_s", "s", "Time rank 0 waited for its packs; dynamic cp only."),
    _gauge("train/divergence_check_s", "s", "Time to compare the weights of replicas bit for bit."),
    # progress and throughput
    _counter("train/tokens", "tokens", "Tokens whose loss counted since the run began."),
    _counter("train/samples", "sequences", "Sequences trained on since the run began."),
    _gauge("train/step_time_s", "s", "Wall time of the step on rank 0."),
    _gauge("train/tokens_per_s", "tokens/s", "Tokens that the step read, without padding, over its wall time."),
    _gauge("train/tokens_per_s_per_worker", "tokens/s", "train/tokens_per_s over the world size."),
    _gauge("train/images_per_s", "images/s", "Images whose patches the step read, over its wall time; models with images only."),
    _gauge("data/image_token_share", "1", "Share of the step's tokens, without padding, that are patches of images."),
    _gauge("train/tflops_per_worker", "TFLOP/s", "Model FLOPs of a step per second and worker; 1e12."),
    _gauge("train/mfu", "1", "Model FLOPs over the device's dense peak, where that is known."),
    _part_gauge("train/group_weight_norm", "group", "1",
                "L2 norm of one tensor group's weights, over all layers."),
    _part_gauge("train/group_grad_norm", "group", "1",
                "L2 norm of one tensor group's gradients, over all layers, before clipping."),
    # statistics of activations and their gradients
    _part_gauge("train/output_mean", "layer", "1", "Mean of a block's output."),
    _part_gauge("train/output_std", "layer", "1", "Standard deviation of a block's output."),
    _part_gauge("train/output_max_abs", "layer", "1", "Largest magnitude in a block's output."),
    _part_gauge("train/output_grad_mean", "layer", "1",
                "Mean of the loss's gradient with respect to a block's output."),
    _part_gauge("train/output_grad_std", "layer", "1",
                "Standard deviation of the gradient with respect to a block's output."),
    _part_gauge("train/output_grad_max_abs", "layer", "1",
                "Largest magnitude in the gradient with respect to a block's output."),
    # mixture of experts
    _part_gauge("moe/max_load", "layer", "1", "Load of the busiest expert over the mean load."),
    _part_gauge("moe/min_load", "layer", "1", "Load of the least busy expert over the mean load."),
    _part_gauge("moe/starved_share", "layer", "1", "Share of experts with less than 0.1 of the mean load."),
    _part_gauge("moe/drop_rate", "layer", "1",
                "Share of a router's choices dropped because the expert's capacity was full."),
    _part_gauge("moe/router_entropy", "layer", "nats",
                "Entropy of a token's router scores, mean over tokens."),
    _part_gauge("moe/router_loss", "layer", "1", "Load balancing loss plus z-loss, mean over tokens."),
    # validation
    _gauge("eval/loss", "nats", "Mean cross entropy of the validation tokens."),
    _gauge("eval/accuracy", "1", "Share of validation documents, questions, tokens or pairs that a head gets right."),
    _part_gauge("eval/set_accuracy", "set", "1", "eval/accuracy of a named validation set."),
    _gauge("eval/perplexity", "1", "exp of eval/loss."),
    _gauge("eval/ema_loss", "nats", "eval/loss of the moving average of the weights; run.eval_ema only."),
    _gauge("eval/ema_accuracy", "1", "eval/accuracy of the moving average of the weights."),
    _gauge("eval/ema_perplexity", "1", "exp of eval/ema_loss."),
    _part_gauge("eval/set_ema_loss", "set", "nats", "eval/set_loss of the moving average of the weights."),
    _part_gauge("eval/set_ema_accuracy", "set", "1", "eval/set_accuracy of the moving average of the weights."),
    _part_gauge("eval/set_ema_perplexity", "set", "1", "exp of eval/set_ema_loss."),
    _part_gauge(
        "eval/set_loss", "set", "nats", "Mean cross entropy of a named validation set's tokens."
    ),
    _part_gauge("eval/set_perplexity", "set", "1", "exp of eval/set_loss."),
    _part_gauge(
        TASK_METRIC, "metric", "1", "Metric of an evaluation task, by task and name: lambada/accuracy."
    ),
    # checkpoints
    _gauge("checkpoint/stall_s", "s", "Time that training stalled for the save."),
    _gauge("checkpoint/save_s", "s", "Time from the start of the save to the commit of its manifest."),
    _gauge("checkpoint/bytes", "bytes", "Size of the checkpoint."),
    _gauge("checkpoint/step", "steps", "Step of the newest checkpoint."),
    _gauge("checkpoint/every_steps", "steps", "Steps between checkpoints, checkpoint.every."),
    _gauge("checkpoint/failed_saves", "saves", "Saves that failed since the driver started."),
    _gauge("checkpoint/skipped_saves", "saves", "Saves skipped since the driver started."),
    _gauge("checkpoint/written_share", "1", "Share of the newest save that workers have written."),
    # snapshots in memory
    _gauge("checkpoint/snapshot_step", "steps",
           "Step of the newest snapshot that every rank holds in memory."),
    _gauge("checkpoint/snapshot_stall_s", "s", "Time that rank 0 stalled for a snapshot."),
    _gauge("checkpoint/snapshot_s", "s", "Time until rank 0's part of a snapshot had all its copies."),
    _gauge("checkpoint/snapshot_bytes", "bytes", "Size of one copy of rank 0's part of a snapshot."),
    _gauge("checkpoint/snapshot_lacking", "ranks",
           "Ranks whose snapshots have fewer copies than they should."),
    _gauge("memory/max_peak_bytes", "bytes", "Largest memory/peak_bytes of all ranks."),
    # state of the run
    _gauge("run/step", "steps", "Completed steps of the run."),
    _gauge("run/total_steps", "steps", "Steps of the whole run, run.steps."),
    _gauge("run/last_step_unix_s", "s", "Unix time of the last completed step."),
    _gauge("run/world_size", "workers", "Workers of the current attempt."),
    _gauge("run/lease_age_s", "s",
           "Time since the driver last renewed its lease; beyond elastic.lease_s another driver may take the run."),
    _gauge("run/spares", "workers", "Spare workers: loaded, and waiting for a rank."),
    _gauge("run/attempt", "1", "Number of the current attempt, from 1."),
    # recorded steps: pipeline bubble and exposed communication
    _gauge("run/bubble", "1", "Measured pipeline bubble: idle time over busy time, all ranks."),
    _gauge("run/simulated_bubble", "1",
           "Simulated bubble of the schedule, with the step's measured durations and transfers that take no time."),
    _gauge("comm/exposed_s", "s",
           "Time a step stalled on collectives of gradients and weights, mean over ranks."),
    _gauge("comm/hidden_share", "1", "Share of these collectives' time that was overlapped with compute."),
    _gauge("comm/cp_sent_bytes", "bytes", "Bytes that rank 0 sent to context-parallel ranks in a step."),
    _gauge("comm/cp_exposed_s", "s", "Time a step stalled on context-parallel transfers, mean over ranks."),
    _gauge("comm/cp_hidden_share", "1",
           "Share of the context-parallel transfers' time that was overlapped with compute."),
    _gauge("comm/experts_sent_bytes", "bytes", "Bytes that rank 0 sent to experts and back in a step."),
    _gauge("comm/experts_exposed_s", "s",
           "Time a step stalled on expert dispatch and combine, mean over ranks."),
    _gauge("comm/update_sent_bytes", "bytes",
           "Bytes that rank 0 sent for an optimizer update, weights excluded."),
    _gauge("comm/update_exposed_s", "s",
           "Time an optimizer update stalled on this communication, mean over ranks."),
    _gauge("comm/experts_hidden_share", "1",
           "Share of the time of expert dispatch and combine that was overlapped with compute."),
    # plug-ins
    _part_gauge("plugin/metric", "name", "1", "Value of a plug-in's metric after a step."),
    # failures and recovery
    _gauge("run/detection_s", "s", "Time from the last sign of progress to a failure's detection."),
    _gauge("run/recovery_s", "s", "Time from a failure's detection until its lost steps are recomputed."),
    _gauge("run/lost_steps", "steps", "Completed steps that were recomputed after a failure."),
    _gauge("run/bad_steps", "steps", "Steps recomputed for a bad loss or norm, since the driver started."),
    _gauge("run/rollbacks", "1", "Rollbacks for a bad loss or norm, since the driver started."),
    _gauge("run/goodput", "1", "Share of the driver's wall time spent on steps that count."),
    _gauge("run/wall_s", "s", "Wall time of the driver."),
    _rank_gauge("memory/peak_bytes", "bytes",
                "Peak memory that torch held on the GPU; on CPUs, peak resident size."),
    _rank_gauge("memory/allocated_bytes", "bytes",
                "Memory that torch holds on the GPU; on CPUs, resident size."),
    _rank_gauge("worker/work_s", "s",
                "Time of a step without its waits for other ranks; on a GPU, device time of its passes."),
    _gauge("worker/max_work_ratio", "1",
           "Largest ratio of worker/work_s to the median of the other ranks of its stage."),
    _rank_gauge("worker/forward_s", "s", "Time in forward passes of one recorded step."),
    _rank_gauge("worker/backward_s", "s", "Time in backward passes of one recorded step."),
    _rank_gauge("worker/transfer_s", "s", "Time in pipeline transfers of one recorded step, waits included."),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in METRICS}
"""Rows by name, without parts."""


def metrics_of(event: RunEvent) -> Mapping[str, float]:
    """Return the event's metrics by name, all of the event's step; empty when it carries none.

    Metrics of single ranks are in ``ranks`` of a Measured.
    """
    match event:
        case Measured():
            return event.metrics
        case AttemptStarted():
            return {"run/attempt": event.attempt}
        case CheckpointCommitted():
            return {
                "checkpoint/stall_s": event.stall_s,
                "checkpoint/save_s": event.save_s,
                "checkpoint/bytes": event.num_bytes,
                "checkpoint/written_share": 1.0,
            }
        case SaveProgress():
            return {"checkpoint/written_share": event.written_bytes / max(1, event.num_bytes)}
        case Recovered():
            return {
                "run/detection_s": event.detection_s,
                "run/recovery_s": event.recovery_s,
                "run/lost_steps": event.lost_steps,
            }
        case RunFinished():
            return {"run/goodput": event.goodput, "run/wall_s": event.wall_s}
        case _:
            return {}


def standing_metrics_of(event: RunEvent) -> Mapping[str, float]:
    """Return the run's state after the event as metrics, for sinks without a step axis."""
    match event:
        case RunStarted():
            return {
                "run/step": event.step,
                "run/total_steps": event.total_steps,
                "checkpoint/step": event.step,
                "checkpoint/every_steps": _checkpoint_every(event.job),
            }
        case WorkersStarted():
            return {"run/world_size": len(event.pids)}
        case AttemptStarted() | StepFinished():
            return {"run/step": event.step}
        case CheckpointCommitted():
            return {"checkpoint/step": event.step}
        case _:
            return {}


def _checkpoint_every(job: Mapping[str, object]) -> float:
    section = job.get("checkpoint")
    every = section.get("every") if isinstance(section, Mapping) else None
    return every if isinstance(every, int) else 0


def find_metric(name: str) -> Metric:
    """Return the row of ``name``; where ``name`` ends in a part of the model, with ``of`` set to it.

    Raises:
        InternalError: The name is not in the table.
    """
    check_names((name,))
    metric, part = _split(name)
    return replace(BY_NAME[metric], of=part)


def task_metrics(task: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an evaluation task under their names in this table."""
    return {f"{TASK_METRIC}/{task}/{name}": value for name, value in metrics.items()}


def check_names(names: Iterable[str]) -> None:
    """Raise InternalError for names that are not in the table: a bug of raymega."""
    unknown = sorted(name for name in names if not _is_known(name))
    if unknown:
        raise InternalError(
            fact=f"metrics {', '.join(unknown)} were reported",
            rule="every metric is a row of raymega/tracking/names.py",
            remedy="add a row with unit, kind and help, or report a name that is there",
        )


def _split(name: str) -> tuple[str, str]:
    """Split a name into metric and part: ``train/output_std/3`` into ``train/output_std`` and ``3``."""
    family, what, part = (*name.split("/", 2), "", "")[:3]
    return f"{family}/{what}", part


def _is_known(name: str) -> bool:
    metric, part = _split(name)
    return metric in BY_NAME and bool(part) == bool(BY_NAME[metric].part)
