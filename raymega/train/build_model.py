"""Construction of a rank's model chunks, of the buffers of their weights and gradients, and of their transfers.

`train/build.py` builds the loader, the executors and the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raymega.config.schema import Job
from raymega.errors import ConfigError
from raymega.model.heads.score_head import language_head
from raymega.model.pipeline_stage import StageModule
from raymega.model.stage_types import stage_type
from raymega.model.vision_stage import VisionStage
from raymega.parallel.comm.process_groups import Group, Groups
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import Context
from raymega.parallel.core.buckets import BucketTable, Sharing, bucket_bytes_for, make_buckets
from raymega.parallel.core.compile import can_fuse
from raymega.parallel.core.host_copies import HostMemory
from raymega.parallel.core.sharded_parameter import ShardedParameter, check_specs, initialise
from raymega.parallel.data_parallel.grad_buffer import GradBuffer
from raymega.parallel.data_parallel.param_buffer import WeightBuffer
from raymega.parallel.data_parallel.state_tensors import FrozenWeights
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.parallel.expert_parallel.overlap import PassInterleaver
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.parallel.tensor_parallel.vocab_logits import Loss, VocabLogits
from raymega.pipeline.p2p import PointToPoint
from raymega.plan.hardware.kernel_choice import compiles_kernels
from raymega.plan.host_memory import offloaded_activation_bytes
from raymega.plan.run_plan import RunPlan
from raymega.plan.stages import Stage
from raymega.plan.zero_levels import level_of
from raymega.plugins import call_plugin, find

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """Part of the model that one rank holds.

    Attributes:
        modules: Model chunks, in the order of their stages.
        states: Tensors without gradients, such as the router's expert bias.
        table: Bucket and place of each weight, frozen ones last.
        weights: Buffer of the parameters' values.
    """

    modules: tuple[StageModule, ...]
    states: tuple[ShardedParameter, ...]
    table: BucketTable
    weights: WeightBuffer

    @property
    def frozen(self) -> list[FrozenWeights]:
        """Parts of the frozen weights that this rank keeps, without those that are held as codes."""
        frozen = [b for b in self.table.buckets if b.is_frozen and not b.is_coded]
        parts = [self.table.owned(bucket) for bucket in frozen]
        return [FrozenWeights(part=part, values=self.weights.owned(part.bucket)) for part in parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model(ModelWeights):
    """Part of the model that one rank trains: ``gradients`` buffers the parameters' summed gradients."""

    gradients: GradBuffer


def build_model(  # noqa: PLR0913  # of an assembler, all that it assembles
    plan: RunPlan,
    rank: int,
    *,
    groups: Groups,
    context: Context,
    experts: ExpertGroups,
    device: torch.device,
    has_initial_values: bool = True,
) -> Model:
    """Build the chunks of ``rank`` with values and gradients, as :func:`build_weights` does."""
    host = None
    if "activations" in plan.job.memory.offload:
        host = HostMemory(device)
        host.reserve(offloaded_activation_bytes(plan, rank))
    model = build_weights(
        plan,
        rank,
        groups=groups,
        context=context,
        experts=experts,
        device=device,
        has_initial_values=has_initial_values,
        host=host,
    )
    return Model(
        modules=model.modules,
        states=model.states,
        table=model.table,
        weights=model.weights,
        gradients=GradBuffer(model.table.trained, groups, log=experts.log),
    )


def build_weights(  # noqa: PLR0913  # of an assembler, all that it assembles
    plan: RunPlan,
    rank: int,
    *,
    groups: Groups,
    context: Context,
    experts: ExpertGroups,
    device: torch.device,
    has_initial_values: bool = True,
    host: HostMemory | None = None,
) -> ModelWeights:
    """Build the chunks of ``rank``; ``experts`` carries the log of transfers.

    Weights get initial values, or zeros without ``has_initial_values``, for a checkpoint to fill.
    ``host`` holds offloaded activations.

    Modules are made on the meta device. Each bucket is then allocated, filled and, under ZeRO-3,
    sharded before the next one, so no rank ever holds all weights or a second copy.
    """
    # modules on the meta device: shapes without memory
    modules = _build_modules(
        plan,
        plan.stages_of(rank),
        context=context,
        experts=experts,
        device=device,
        host=host,
        balanced=groups.dp,
    )
    parameters, states = _parameters_by_chunk(modules)
    check_specs([*states, *(parameter for chunk in parameters for parameter in chunk)])
    # buckets: which parameters share one collective, over which replicas
    table = make_buckets(
        parameters,
        Sharing(whole=groups.replicas, inside=groups.sharers, across=groups.copies),
        experts=Sharing(
            whole=groups.edp, inside=groups.expert_sharers, across=groups.expert_copies
        ),
        level=level_of(plan.job.parallel),
        bucket_bytes=bucket_bytes_for(p for chunk in parameters for p in chunk),
        units=_units(modules),
    )
    # memory and initial values, bucket by bucket
    fill = partial(initialise, seed=plan.job.run.seed) if has_initial_values else leave_zeros
    weights = WeightBuffer(
        table,
        log=experts.log,
        fill=fill,
        cut_of=lambda bucket: groups.etp if bucket.is_expert else groups.tp,
    )
    _hand_out(weights, modules)
    return ModelWeights(modules=tuple(modules), states=tuple(states), table=table, weights=weights)


def leave_zeros(_param: ShardedParameter) -> None:
    """Leave a parameter's new memory as it is, zeros."""


def _build_modules(  # noqa: PLR0913  # of an assembler, all that it assembles
    plan: RunPlan,
    stages: Sequence[Stage],
    *,
    context: Context,
    experts: ExpertGroups,
    device: torch.device,
    host: HostMemory | None,
    balanced: Group,
) -> list[StageModule]:
    """Return the rank's model chunks; the last stage shares a tied embedding with a first on this rank."""
    job = plan.job
    is_fused = compiles_kernels(job, device.type) and can_fuse(device)
    modules: list[StageModule] = []
    for stage in stages:
        first = modules[0].embedding if modules else None
        modules.append(
            stage_type(job.model)(
                job.model,
                stage,
                sp=experts.sp,
                dtype=DTYPES[job.precision.dtype],
                device=device,
                seed=job.run.seed,
                context=context,
                experts=experts,
                token_table=first.tokens.weight if first is not None else None,
                is_fused=is_fused,
                precision=job.precision,
                is_meta=True,
            )
        )
        modules[-1].recompute(job.memory, host)
        if isinstance(modules[-1], VisionStage) and job.parallel.balance_images:
            modules[-1].balanced = balanced
        if job.model.loss != "cross_entropy" and (head := modules[-1].head):
            language_head(head).training_loss = plugin_loss(job)
    return modules


def plugin_loss(job: Job) -> Loss:
    """Return the loss of a plug-in; when it fails, or returns another shape, the error names it."""
    row, code = find("loss", job.model.loss), job.plugins.code("loss", job.model.loss)

    def loss(logits: VocabLogits, labels: Tensor) -> Tensor:
        losses: Tensor = call_plugin(row, lambda: code(logits, labels))
        if getattr(losses, "shape", None) == labels.shape and losses.requires_grad:
            return losses
        found = f"shape {[*losses.shape]}" if isinstance(losses, Tensor) else f"{losses!r:.60}"
        raise ConfigError(
            fact=f"loss {row.name} returned {found}",
            rule=f"it is a loss for each label, {[*labels.shape]}, with a gradient",
            remedy=f"correct {row.target}",
        )

    return loss


def make_expert_groups(
    job: Job, groups: Groups, *, sp: SequenceParallel, log: CommLog, device: torch.device
) -> ExpertGroups:
    """Return what layers with experts need of the grid; ``log`` records their transfers."""
    overlaps = job.parallel.overlap_moe_expert_parallel_comm
    return ExpertGroups(
        ep=groups.ep,
        etp=groups.etp,
        micro=groups.micro,
        sp=sp,
        is_gathered=job.parallel.moe_token_dispatcher_type == "all_gather",
        log=log,
        interleaver=PassInterleaver(device) if overlaps else None,
    )


def make_p2p(
    plan: RunPlan, groups: Groups, *, token_degree: int, device: torch.device
) -> PointToPoint:
    """Return the pipeline's transfers of activations [S/token_degree, B, D]."""
    job = plan.job
    return PointToPoint(
        groups,
        placement=plan.placement,
        shape=(
            job.data.seq_len // token_degree,
            plan.batch.micro_batch_size,
            job.model.hidden_size,
        ),
        dtype=DTYPES[job.precision.dtype],
        device=device,
        timeout_s=job.elastic.collective_timeout_s,
    )


def _hand_out(weights: WeightBuffer, modules: Sequence[StageModule]) -> None:
    """Connect modules to the weight buffer: wait before use, drop FP8 copies after an update."""
    for module in modules:
        module.before_use = weights.wait_for
        module.are_weights_passing = weights.has_parts_only
        module.fp8.copies.is_kept = not weights.has_parts_only
        weights.after_update.append(module.fp8.copies.forget)


def _parameters_by_chunk(
    modules: Sequence[StageModule],
) -> tuple[list[list[ShardedParameter]], list[ShardedParameter]]:
    """Return each chunk's weights in forward order, and the tensors that are no weights.

    A parameter that two chunks share belongs to the first one. Backward reaches that chunk last, so
    when its gradients are complete, those of the other chunk are too.
    """
    chunks: list[list[ShardedParameter]] = []
    taken: dict[ShardedParameter, None] = {}
    for module in modules:
        found = [p for p in module.parameters() if isinstance(p, ShardedParameter)]
        chunks.append([p for p in found if p not in taken and p.spec.role != "state"])
        taken |= dict.fromkeys(found)
    return chunks, [param for param in taken if param.spec.role == "state"]


def _units(modules: Sequence[StageModule]) -> dict[ShardedParameter, int]:
    """Return for each parameter the number of the unit (block, embedding, head) that uses it first."""
    places: dict[ShardedParameter, int] = {}
    for number, unit in enumerate(unit for module in modules for unit in module.units()):
        for param in unit.parameters():
            assert isinstance(param, ShardedParameter), "a stage has no other parameters"
            places.setdefault(param, number)
    return places
