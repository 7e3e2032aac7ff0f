"""Estimate the cost of a save to a rank: bytes written, host memory, files, and the least time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from raymega.box import Box
from raymega.config.schema import Job
from raymega.plan.grid import ExpertPlace
from raymega.plan.layers.global_tensor import Role
from raymega.plan.memory.optimizer_state import format_of, kinds_of, state_bytes
from raymega.plan.memory.quantized_blocks import scale_boxes
from raymega.plan.memory.state_bytes import DTYPE_BYTES, block_kinds
from raymega.plan.run_plan import RunPlan
from raymega.plan.stages import Stage
from raymega.plan.tensor_table import stage_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCost:
    """Cost of one checkpoint for one rank.

    Attributes:
        share_bytes: Bytes that the rank writes.
        buffer_bytes: Host memory of the rank's copy; 0 where snapshots' memory holds that.
        num_files: Number of data files, at least.
        least_s: Seconds of the write at checkpoint.bytes_per_s; 0 without such a limit.
    """

    share_bytes: int
    buffer_bytes: int
    num_files: int
    least_s: float


def save_cost(plan: RunPlan, rank: int) -> SaveCost:
    """Return the cost of ``rank``'s part of a checkpoint.

    It is exact except for rows that replicas share unevenly.
    """
    section, share = plan.job.checkpoint, share_bytes(plan, rank)
    buffer_bytes = min(share, section.buffer_bytes or share)
    # A data file is never larger than the buffer.
    file_bytes = min(section.file_bytes, buffer_bytes) or 1  # a rank without trained tensors
    return SaveCost(
        share_bytes=share,
        buffer_bytes=0 if shares_snapshot(plan.job) else buffer_bytes,
        num_files=-(-share // file_bytes),
        least_s=share / section.bytes_per_s if section.bytes_per_s else 0.0,
    )


def shares_snapshot(job: Job) -> bool:
    """Return whether a checkpoint is read from the memory of snapshots.

    No snapshot begins then until the checkpoint is written.
    """
    section = job.elastic
    is_paused = section.snapshot_every > 0 and section.snapshot_during_save == "pause"
    return is_paused and not job.checkpoint.buffer_bytes


def share_bytes(plan: RunPlan, rank: int) -> int:
    """Return the bytes of ``rank``'s part of a checkpoint.

    These are masters and optimizer state, and without adapters frozen weights, without a tied copy,
    divided by their replicas, sharded or not.
    """
    job, grid, stages = plan.job, plan.grid, plan.stages_of(rank)
    place = grid.tp, grid.coords(rank).tp, grid.expert_place(rank)
    # The stages' ends, and one block of each kind.
    parts = [(replace(stage, num_layers=0), 1) for stage in stages]
    for (layer, _), times in block_kinds(job.model, stages).items():
        # A middle stage, so that it has a block and no end.
        block = replace(stages[0], index=1, num_stages=3, first_layer=layer, num_layers=1)
        parts.append((block, times))
    dense = experts = 0
    for part, times in parts:
        held = _held_bytes(job, part, *place)
        dense, experts = dense + times * held[0], experts + times * held[1]
    return -(-dense // grid.replicas) + -(-experts // grid.edp)


@lru_cache(maxsize=4096)
def _held_bytes(
    job: Job, stage: Stage, tp: int, tp_rank: int, place: ExpertPlace
) -> tuple[int, int]:
    """Return the bytes of dense tensors and of experts in ``stage``, before replicas divide them."""
    held = {False: 0, True: 0}
    for tensor in stage_tensors(job.model, stage):
        # a tied table is saved by the first stage alone
        if stage.is_first or tensor.role != "embedding":
            box = tensor.box(tp=tp, tp_rank=tp_rank, experts=place)
            of_tensor = _bytes_of(job, tensor.role, box) if tensor.is_trained else 0
            # with adapters a checkpoint lacks what is frozen
            if tensor.is_frozen and not job.model.lora.r:
                of_tensor = box.num_elements * (_wide(job) if tensor.is_wide else _narrow(job))
            held[tensor.is_expert] += of_tensor
    return held[False], held[True]


def _bytes_of(job: Job, role: Role, box: Box) -> int:
    """Return the bytes of a master, of its moving average and its optimizer state."""
    # The master is in float32 or better; moments may have fewer bits.
    full, form = _wide(job), format_of(job.optimizer, role)
    of_kind = state_bytes(form, box.num_elements, scale_boxes(box).begun.num_elements, full)
    full *= 1 + (job.optimizer.ema_decay > 0)  # a moving average is as large as the master
    return box.num_elements * full + of_kind * len(kinds_of(job.optimizer.name, role))


def _narrow(job: Job) -> int:
    return DTYPE_BYTES[job.precision.dtype]


def _wide(job: Job) -> int:
    return max(4, _narrow(job))
