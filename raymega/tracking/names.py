"""The one table of metric names: name, unit, kind and help line of everything a run measures.

Console, JSON lines, MLflow, Prometheus and dashboards derive from it. Which event carries which
metric is tracking.sink's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from raymega.errors import Fault, InternalError


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One thing that is measured; a gauge is a value of now, a counter a total that only rises.

    Attributes:
        name: Family and what, ``train/loss``.
        unit: Of its values.
        kind: See above.
        help: One sentence.
        is_per_rank: Each rank has its own.
        part: Each part of the model has its own, and this is what parts are: ``layer``. Their names
            are ``name/part``, as ``train/output_std/3``; in Prometheus parts are a label.
        of: The part, for a metric that was found by such a name.
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
        """The name without its family: ``loss`` of ``train/loss``; the key in JSON lines."""
        name = self.name.partition("/")[2]
        return f"{name}/{self.of}" if self.of else name

    @property
    def prometheus_name(self) -> str:
        """The name in Prometheus' alphabet: ``raymega_train_loss``; Ray puts ``ray_`` before it."""
        return "raymega_" + self.name.replace("/", "_")


def _gauge(name: str, unit: str, help_line: str) -> Metric:
    return Metric(name=name, unit=unit, kind="gauge", help=help_line)


def _rank_gauge(name: str, unit: str, help_line: str) -> Metric:
    return Metric(name=name, unit=unit, kind="gauge", help=help_line, is_per_rank=True)


def _part_gauge(name: str, part: str, unit: str, help_line: str) -> Metric:
    return Metric(name=name, unit=unit, kind="gauge", help=help_line, part=part)


def _counter(name: str, unit: str, help_line: str) -> Metric:
    return Metric(name=name, unit=unit, kind="counter", help=help_line)


METRICS = (
    _gauge("train/loss", "nats", "Mean cross entropy of the step's unmasked tokens."),
    _gauge("train/mtp_loss", "nats", "The same of tokens further ahead, mean of depths; MTP only."),
    _gauge("train/grad_norm", "1", "L2 norm of the whole gradient, before clipping."),
    _gauge("train/lr", "1", "Learning rate of the step."),
    _part_gauge(
        "train/role_lr",
        "role",
        "1",
        "The same of tables, head and the last block, where it differs.",
    ),
    _gauge("train/global_batch_size", "sequences", "Sequences of the step, all ranks."),
    _gauge("train/loss_scale", "1", "Loss scale of the next step; float16 only."),
    _counter("train/skipped_steps", "steps", "Steps without update: an overflow, or a bad batch."),
    _gauge("data/packing_efficiency", "1", "Share of packed rows that is no padding."),
    _gauge("data/imbalance", "1", "Largest over mean work of ranks, as planned; dynamic cp only."),
    _gauge("data/micro_batches", "1", "Micro-batches of the step; dynamic cp only."),
    _gauge("data/pack_ranks", "ranks", "Ranks that share a pack, mean of tokens; dynamic cp only."),
    _gauge("data/most_pack_ranks", "ranks", "The most ranks that share one; dynamic cp only."),
    _gauge("data/schedule_wait_s", "s", "Time rank 0 waited for its packs; dynamic cp only."),
    _gauge("train/divergence_check_s", "s", "Time of the look whether replicas' bits are equal."),
    _counter("train/tokens", "tokens", "Unmasked tokens trained on since the run began."),
    _counter("train/samples", "sequences", "Sequences trained on since the run began."),
    _gauge("train/step_time_s", "s", "Wall time of the step on rank 0."),
    _gauge("train/tokens_per_s", "tokens/s", "Unmasked tokens of the step over its wall time."),
    _gauge("train/tokens_per_s_per_worker", "tokens/s", "train/tokens_per_s over the world size."),
    _gauge(
        "train/tflops_per_worker", "TFLOP/s", "Model FLOPs of a step per second and worker; 1e12."
    ),
    _gauge("train/mfu", "1", "Model FLOPs over the device's dense peak, where that is known."),
    _part_gauge(
        "train/group_weight_norm", "group", "1", "L2 norm of a kind of tensors, over all layers."
    ),
    _part_gauge(
        "train/group_grad_norm", "group", "1", "L2 norm of their gradient, before clipping."
    ),
    _part_gauge("train/output_mean", "layer", "1", "Mean of a block's output."),
    _part_gauge("train/output_std", "layer", "1", "Standard deviation of a block's output."),
    _part_gauge("train/output_max_abs", "layer", "1", "Largest magnitude in a block's output."),
    _part_gauge("train/output_grad_mean", "layer", "1", "Mean of the loss's gradient by it."),
    _part_gauge("train/output_grad_std", "layer", "1", "Standard deviation of that gradient."),
    _part_gauge("train/output_grad_max_abs", "layer", "1", "Largest magnitude in that gradient."),
    _part_gauge("moe/max_load", "layer", "1", "Load of the busiest expert over an even load."),
    _part_gauge("moe/min_load", "layer", "1", "Load of the idlest expert over an even load."),
    _part_gauge(
        "moe/starved_share", "layer", "1", "Share of experts with less than 0.1 of an even load."
    ),
    _part_gauge("moe/drop_rate", "layer", "1", "Share of choices dropped for want of capacity."),
    _part_gauge("moe/router_entropy", "layer", "nats", "Mean entropy of a token's scores."),
    _part_gauge("moe/router_loss", "layer", "1", "Balancing loss and z-loss, mean of tokens."),
    _gauge("eval/loss", "nats", "Mean cross entropy of the validation tokens."),
    _gauge("eval/perplexity", "1", "exp of eval/loss."),
    _gauge("checkpoint/stall_s", "s", "Time that training stood still for the save."),
    _gauge("checkpoint/save_s", "s", "Time from the save's begin to the manifest's commit."),
    _gauge("checkpoint/bytes", "bytes", "Size of the checkpoint."),
    _gauge("checkpoint/step", "steps", "Step of the newest checkpoint."),
    _gauge("checkpoint/every_steps", "steps", "The job's checkpoint.every."),
    _gauge("checkpoint/failed_saves", "saves", "Saves that failed since the driver began."),
    _gauge("checkpoint/skipped_saves", "saves", "Saves left out since the driver began."),
    _gauge("checkpoint/written_share", "1", "Share of the newest save that workers have written."),
    _gauge("checkpoint/snapshot_step", "steps", "Newest snapshot that every rank has in memory."),
    _gauge("checkpoint/snapshot_stall_s", "s", "Time that rank 0 stood still for a snapshot."),
    _gauge("checkpoint/snapshot_s", "s", "Time until rank 0's part of it had its copies."),
    _gauge(
        "checkpoint/snapshot_bytes", "bytes", "Size of one copy of rank 0's part of a snapshot."
    ),
    _gauge("checkpoint/snapshot_lacking", "ranks", "Ranks whose snapshots have fewer copies."),
    _gauge("memory/max_peak_bytes", "bytes", "Largest memory/peak_bytes of all ranks."),
    _gauge("run/step", "steps", "Completed steps of the run."),
    _gauge("run/total_steps", "steps", "The job's run.steps."),
    _gauge("run/last_step_unix_s", "s", "Unix time of the last completed step."),
    _gauge("run/world_size", "workers", "Workers of the attempt that are at work."),
    _gauge(
        "run/lease_age_s",
        "s",
        "Since the store last said that the run is this driver's; beyond elastic.lease_s another may take it.",
    ),
    _gauge("run/spares", "workers", "Workers that are loaded and wait without a rank."),
    _gauge("run/attempt", "1", "Number of the worker group at work, from 1."),
    _gauge("run/bubble", "1", "Measured pipeline idle time over busy time, all ranks."),
    _gauge(
        "run/simulated_bubble",
        "1",
        "The same by the schedule alone, with the step's own durations and free messages.",
    ),
    _gauge("comm/exposed_s", "s", "Time a step stood still for gradients and weights, by rank."),
    _gauge("comm/hidden_share", "1", "Share of these collectives' time that went by beside work."),
    _gauge("comm/cp_sent_bytes", "bytes", "Sent by rank 0 to context-parallel ranks in a step."),
    _gauge("comm/cp_exposed_s", "s", "Time a step stood still for such transfers, mean of ranks."),
    _gauge("comm/cp_hidden_share", "1", "Share of their time that went by beside work."),
    _gauge("comm/experts_sent_bytes", "bytes", "Sent by rank 0 to experts and back in a step."),
    _gauge("comm/experts_exposed_s", "s", "Time a step stood still for that, mean of ranks."),
    _gauge("comm/update_sent_bytes", "bytes", "Sent by rank 0 for an update, weights apart."),
    _gauge("comm/update_exposed_s", "s", "Time an update stood still for that, mean of ranks."),
    _gauge("comm/experts_hidden_share", "1", "Share of that travel that went by beside work."),
    _gauge("run/detection_s", "s", "Time from the last sign of progress to a failure's detection."),
    _gauge(
        "run/recovery_s", "s", "From a failure's detection until its lost steps are made up for."
    ),
    _gauge("run/lost_steps", "steps", "Completed steps that a failure made to be done again."),
    _gauge("run/bad_steps", "steps", "Steps done once more for bad numbers, since the start."),
    _gauge("run/rollbacks", "1", "Times that the driver went back for bad numbers."),
    _gauge("run/goodput", "1", "Share of the driver's wall time spent on steps that count."),
    _gauge("run/wall_s", "s", "Wall time of the driver."),
    _rank_gauge(
        "memory/peak_bytes",
        "bytes",
        "Most that torch held on the GPU; on CPUs, peak resident size.",
    ),
    _rank_gauge(
        "memory/allocated_bytes", "bytes", "What torch holds on the GPU; on CPUs, resident size."
    ),
    _rank_gauge("worker/work_s", "s", "Time of a step less waits for other ranks; CPUs only."),
    _gauge(
        "worker/max_work_ratio", "1", "Largest worker/work_s over the median of its stage's others."
    ),
    _rank_gauge("worker/forward_s", "s", "Time in forward work of one step, by time line."),
    _rank_gauge("worker/backward_s", "s", "Time in backward work of one step, by time line."),
    _rank_gauge("worker/transfer_s", "s", "Time in pipeline transfers, waiting included."),
)

_BY_NAME = {metric.name: metric for metric in METRICS}


def find_metric(name: str) -> Metric:
    """The row of ``name``; for one part of the model the row with ``of``.

    Raises:
        InternalError: It is not in the table.
    """
    check_names((name,))
    metric, part = _split(name)
    return replace(_BY_NAME[metric], of=part)


def find_row(name: str) -> Metric:
    """The row of ``name`` as the table has it: of all parts together, where a metric has parts.

    Raises:
        InternalError: It is not in the table.
    """
    if name not in _BY_NAME:
        check_names((name,))
    return _BY_NAME[name]


def check_names(names: Iterable[str]) -> None:
    """Refuse names that are not in the table: an undeclared metric is a mistake of ours."""
    unknown = sorted(name for name in names if not _is_known(name))
    if unknown:
        raise InternalError(
            Fault(
                fact=f"metrics {', '.join(unknown)} were reported",
                rule="every metric is a row of raymega/tracking/names.py",
                remedy="add a row with unit, kind and help, or report a name that is there",
            )
        )


def _split(name: str) -> tuple[str, str]:
    """Metric and part: ``train/loss`` and nothing, ``train/output_std`` and ``3``."""
    family, what, part = (*name.split("/", 2), "", "")[:3]
    return f"{family}/{what}", part


def _is_known(name: str) -> bool:
    metric, part = _split(name)
    return metric in _BY_NAME and bool(part) == bool(_BY_NAME[metric].part)
