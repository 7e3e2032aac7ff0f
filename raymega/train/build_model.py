"""From a plan and a rank's groups to its model chunks and the buffers that their parameters live in.

It builds no loader, schedule or optimizer: that is build's, the only one to call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from raymega.model.pipeline_stage import StageModule
from raymega.parallel.comm.process_groups import Groups
from raymega.parallel.context_parallel.context import Context
from raymega.parallel.core.buckets import BucketTable, Sharing, bucket_bytes_for, make_buckets
from raymega.parallel.core.compile import can_fuse
from raymega.parallel.core.sharded_parameter import ShardedParameter, check_specs, initialise
from raymega.parallel.data_parallel.grad_buffer import GradBuffer
from raymega.parallel.data_parallel.param_buffer import WeightBuffer
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from raymega.plan.run_plan import RunPlan
from raymega.plan.stages import Stage
from raymega.plan.zero_levels import level_of

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a rank holds of the model.

    Attributes:
        modules: Its chunks.
        states: Tensors in them that no gradient reaches.
        table: Where everything else lies.
        gradients: Their sums.
        weights: Their values.
    """

    modules: tuple[StageModule, ...]
    states: tuple[ShardedParameter, ...]
    table: BucketTable
    gradients: GradBuffer
    weights: WeightBuffer


def build_model(
    plan: RunPlan,
    stages: Sequence[Stage],
    *,
    groups: Groups,
    context: Context,
    experts: ExpertGroups,
    device: torch.device,
) -> Model:
    """Chunks of ``stages``, their parameters with initial values; ``experts`` has the log of transfers.

    A parameter gets its memory as a part of its bucket, one bucket after the other, so a rank that
    keeps parts of weights never has all of them, and nobody has any twice.
    """
    modules = _build_modules(plan, stages, context=context, experts=experts, device=device)
    parameters, states = _parameters_by_chunk(modules)
    check_specs([*states, *(parameter for chunk in parameters for parameter in chunk)])
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
    fill = partial(initialise, seed=plan.job.run.seed)
    weights = WeightBuffer(table, log=experts.log, fill=fill)
    _hand_out(weights, modules)
    return Model(
        modules=tuple(modules),
        states=tuple(states),
        table=table,
        gradients=GradBuffer(table, groups, log=experts.log),
        weights=weights,
    )


def _build_modules(
    plan: RunPlan,
    stages: Sequence[Stage],
    *,
    context: Context,
    experts: ExpertGroups,
    device: torch.device,
) -> list[StageModule]:
    """The rank's model chunks; a last stage shares a tied table with a first one beside it."""
    job = plan.job
    modules: list[StageModule] = []
    for stage in stages:
        first = modules[0].embedding if modules else None
        modules.append(
            StageModule(
                job.model,
                stage,
                sp=experts.sp,
                dtype=DTYPES[job.precision.dtype],
                device=device,
                seed=job.run.seed,
                context=context,
                experts=experts,
                token_table=first.tokens.weight if first is not None else None,
                is_fused=job.run.kernels == "compile" and can_fuse(device),
                precision=job.precision,
                is_meta=True,
            )
        )
        modules[-1].recompute(job.memory)
    return modules


def _hand_out(weights: WeightBuffer, modules: Sequence[StageModule]) -> None:
    """Modules ask for weights before they use them, and are told when these have changed."""
    for module in modules:
        module.before_use = weights.wait_for
        module.are_weights_passing = weights.has_parts_only
        module.fp8.copies.is_kept = not weights.has_parts_only
        weights.after_update.append(module.fp8.copies.forget)


def _parameters_by_chunk(
    modules: Sequence[StageModule],
) -> tuple[list[list[ShardedParameter]], list[ShardedParameter]]:
    """Parameters of each chunk in forward order, and tensors of state, which no gradient reaches.

    One that two chunks share belongs to the first: a micro-batch's backward comes there last, so
    when the first chunk's gradients are complete, the other's are too.
    """
    chunks: list[list[ShardedParameter]] = []
    taken: dict[ShardedParameter, None] = {}
    for module in modules:
        found = [p for p in module.parameters() if isinstance(p, ShardedParameter)]
        chunks.append([p for p in found if p not in taken and p.spec.is_trained])
        taken |= dict.fromkeys(found)
    return chunks, [param for param in taken if not param.spec.is_trained]


def _units(modules: Sequence[StageModule]) -> dict[ShardedParameter, int]:
    """In which unit of the rank's model chunks each parameter is first used."""
    places: dict[ShardedParameter, int] = {}
    for number, unit in enumerate(unit for module in modules for unit in module.units()):
        for param in unit.parameters():
            assert isinstance(param, ShardedParameter), "a stage has no other parameters"
            places.setdefault(param, number)
    return places
