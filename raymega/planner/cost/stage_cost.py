"""Compute seconds and bytes of a stage for one micro-batch, once for each kind of stage.

``raymega.planner.cost.block_times`` prices its blocks, and ``raymega.plan.memory.activation_bytes``
counts their activations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raymega.config.schema import Job
from raymega.plan.flops import trained_share
from raymega.plan.fp8_layers import Fp8Coverage
from raymega.plan.grid import Grid
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.memory.activation_bytes import (
    StageActivations,
    further_bytes,
    head_bytes,
    stage_activations,
)
from raymega.plan.memory.activation_shape import ActivationShape, activation_shape
from raymega.plan.memory.elements import Elements
from raymega.plan.memory.state_bytes import StateSize, state_of
from raymega.plan.stages import Stage
from raymega.plan.tensor_table import is_head_frozen
from raymega.planner.cost.block_times import BlockTimes, block_times
from raymega.planner.cost.end_times import embedding_time, head_time, join_time, tower_time
from raymega.planner.cost.rank_classes import StageKind
from raymega.planner.cost.working_memory import WorkingMemory, working_memory
from raymega.planner.kernels.system_traits import Software
from raymega.schedule.simulate import Durations


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """Seconds of one stage for one micro-batch.

    Attributes:
        forward_s: Seconds of the forward.
        backward_s: Seconds of the backward, recompute included.
        weight_s: Seconds of the weight gradients in it, for a backward that is split in two.
        tensor_parallel_s: Seconds of traffic over tp and cp in both passes.
        experts_s: Seconds of sending tokens to experts and back in both passes.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    tensor_parallel_s: float
    experts_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of both passes."""
        return self.forward_s + self.backward_s

    @property
    def durations(self) -> Durations:
        """Durations of the passes, as the simulation of a schedule takes them."""
        return Durations(forward=self.forward_s, backward=self.backward_s, weight=self.weight_s)


class StageCosts:
    """Costs of stages in layouts with the same cut of tensors, recompute and micro-batch size."""

    def __init__(
        self,
        shape: ActivationShape,
        device: Accelerator | None = None,
        blocks: BlockTimes | None = None,
        states: dict[tuple[object, ...], StateSize] | None = None,
    ) -> None:
        """Prepare the costs; without ``device`` and ``blocks`` only bytes are available.

        ``states`` are the state sizes that costs of a search share: its jobs differ in degrees and sharding alone.
        """
        self._states = {} if states is None else states
        self.shape = shape
        self._device, self._blocks = device, blocks
        self._kept: dict[StageKind, StageActivations] = {}
        self._times: dict[StageKind, StageTime] = {}
        self._heads: dict[int, int] = {}
        self._working: dict[bool, WorkingMemory] = {}

    def kept(self, kind: StageKind, stage: Stage) -> StageActivations:
        """Return the activations that a rank keeps of a micro-batch in ``stage``, of ``kind``."""
        if kind not in self._kept:
            self._kept[kind] = stage_activations(self.shape, stage)
        return self._kept[kind]

    def state(self, job: Job, held: Elements, grid: Grid) -> StateSize:
        """Return the state of a rank that holds ``held``."""
        key = held, grid, job.parallel.sharding, job.parallel.data_parallel_shard_degree
        if key not in self._states:
            self._states[key] = state_of(job, held, grid)
        return self._states[key]

    def head_bytes(self, stage: Stage) -> int:
        """Return the bytes that the heads of ``stage`` keep of a micro-batch; 0 on all but the last."""
        if not stage.is_last:
            return 0
        further = len(self.shape.further(stage))
        if further not in self._heads:
            more = further * further_bytes(self.shape) if further else 0
            self._heads[further] = head_bytes(self.shape) + more
        return self._heads[further]

    def working(self, *, has_experts: bool) -> WorkingMemory:
        """Return what kernels hold in a backward on a rank that has blocks with or without experts."""
        if has_experts not in self._working:
            self._working[has_experts] = working_memory(self.shape, has_experts=has_experts)
        return self._working[has_experts]

    def time(self, kind: StageKind, stage: Stage) -> StageTime:
        """Return the seconds of a micro-batch through ``stage``, of ``kind``."""
        if kind not in self._times:
            assert self._blocks is not None and self._device is not None, (
                "bytes alone were asked for"
            )
            self._times[kind] = _stage_time(stage, self.shape, self._blocks, self._device)
        return self._times[kind]


def stage_costs(
    job: Job, device: Accelerator, software: Software, *, fp8_coverage: Fp8Coverage | None = None
) -> StageCosts:
    """Return the costs of a job's stages on ``device``.

    ``fp8_coverage`` has the fp8 products of all blocks, where the job itself does not configure
    them.
    """
    shape = activation_shape(job)
    shape = replace(shape, fp8_coverage=fp8_coverage) if fp8_coverage else shape
    return StageCosts(shape, device, block_times(shape, device, software))


def _stage_time(
    stage: Stage, shape: ActivationShape, blocks: BlockTimes, device: Accelerator
) -> StageTime:
    """Return the seconds of a stage: its blocks and, at the ends, embedding and head."""
    # Full recompute runs the forward's traffic again.
    passes = 3 if shape.memory.recompute == "full" else 2
    further = len(shape.further(stage))
    forward = backward = weight = traffic = experts = 0.0
    trained = trained_share(shape.model)
    # Transformer blocks of each kind.
    for number, block in blocks.of_stage(shape, stage):
        once, once_backward = block.pass_s(shape.memory.recompute, shape.memory.recompute_parts)
        of_weights = block.backward_s / 2
        once_backward -= (1 - trained) * of_weights
        forward, backward = forward + number * once, backward + number * once_backward
        weight += number * trained * of_weights
        once_s = block.tensor_parallel_s + block.context_parallel_s
        traffic += number * (passes * once_s - block.hidden_s)
        experts += number * passes * block.experts_s
    # Embedding, heads, and projections of multi-token prediction.
    ends = (
        (int(stage.is_first), embedding_time),
        (int(stage.is_first and shape.model.vision.is_on), tower_time),
        (int(stage.is_last) + further, head_time),
        (further, join_time),
    )
    for number, part in ends:
        if number:
            more, more_backward = part(shape, device)
            forward, backward = forward + number * more, backward + number * more_backward
            has_weights = part is not head_time or not is_head_frozen(shape.model)
            weight += number * more_backward / 2 * has_weights
    return StageTime(
        forward_s=forward, backward_s=backward, weight_s=weight, tensor_parallel_s=traffic,
        experts_s=experts,
    )  # fmt: skip
