"""Rules between the values of a job: what no single field can break.

Each rule names the fields that it reads and runs when all of them parsed. Checks that must look at
data or at a store are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from raymega.config.schema import ParallelSection
from raymega.errors import Fault
from raymega.plan import init_from_rules
from raymega.plan.fp8_layers import FP8_CHECKS
from raymega.plan.grid import grid_faults, world_fault
from raymega.plan.stages import EVEN_ONLY, KINDS, layer_counts, make_stages, placement_faults
from raymega.plan.validation.attention import HEAD_CHECKS
from raymega.plan.validation.checkpoint import buffer_faults, keep_best_faults
from raymega.plan.validation.context_parallel import (
    DOCUMENT_CHECKS,
    exchange_faults,
    position_faults,
    weight_dropout_faults,
)
from raymega.plan.validation.elastic import (
    hang_faults,
    host_faults,
    min_workers_faults,
    ratio_faults,
    spares_faults,
)
from raymega.plan.validation.moe import (
    cut_width_faults,
    dynamic_faults,
    expert_place_faults,
    expert_token_faults,
    moe_faults,
    overlap_faults,
)
from raymega.plan.validation.training import (
    attention_weight_faults,
    batch_ramp_faults,
    loss_scale_faults,
    lr_schedule_faults,
    lr_step_faults,
    packed_dropout_faults,
    packing_faults,
    recompute_faults,
)
from raymega.plan.validation.unused_fields import default_of, unused_faults
from raymega.plan.zero_levels import SHARDING_FIELDS, sharding_group_faults
from raymega.schedule.order import make_sizes
from raymega.schedule.table import make_placement, schedule_faults, unused_size_faults

PLACING = ("stages", *EVEN_ONLY)
SCHEDULING = ("microbatch_group_size_per_vp_stage", "max_in_flight_microbatches",
              "wgrad_activation_fraction")  # fmt: skip
MAX_LISTED = 100_000
"""Layers of a model, and stages of a pipeline: more than anyone has, and few enough to be looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """``check`` gets the values of ``reads`` in order and returns what is wrong."""

    reads: tuple[str, ...]
    check: Callable[..., list[Fault]]


def job_faults(values: Mapping[str, Any]) -> list[Fault]:
    """Faults of every rule whose fields are all in ``values`` (dotted path to value)."""
    faults = []
    for rule in RULES:
        try:
            read = [values[path] for path in rule.reads]
        except KeyError:
            continue
        faults += rule.check(*read)
    return faults + unused_faults(values)


def _must_divide(axis: str, field: str) -> Rule:
    """parallel.<axis> must divide model.<field>."""

    def check(degree: int, number: int) -> list[Fault]:
        if number % degree == 0:
            return []
        legal = ", ".join(str(d) for d in range(1, number + 1) if number % d == 0 and d <= 1024)
        return [
            Fault(
                fact=f"parallel.{axis}={degree}",
                rule=f"it must divide model.{field}={number} (remainder {number % degree})",
                remedy=f"use one of {legal}",
            )
        ]

    return Rule(reads=(f"parallel.{axis}", f"model.{field}"), check=check)


def _kv_heads(tp: int, heads: int, kv_heads: int | str) -> list[Fault]:
    if kv_heads == "num_heads":
        return []
    assert isinstance(kv_heads, int), "strict parsing lets no other string through"
    faults = []
    if heads % kv_heads:
        faults.append(
            Fault(
                fact=f"model.num_kv_heads={kv_heads}",
                rule=f"it must divide model.num_heads={heads} (remainder {heads % kv_heads})",
                remedy="use a divisor, or num_heads for as many as there are query heads",
            )
        )
    if kv_heads % tp and tp % kv_heads:
        faults.append(
            Fault(
                fact=f"parallel.tp={tp}",
                rule=f"ranks hold whole key and value heads, or share one: it must divide "
                f"model.num_kv_heads={kv_heads} or be a multiple of it",
                remedy=f"use a divisor of {kv_heads} or a multiple of it",
            )
        )
    return faults


def _table_rows(tp: int, vocab_size: int, multiple: int) -> list[Fault]:
    rows = -(-vocab_size // multiple) * multiple
    if rows % tp == 0:
        return []
    return [
        Fault(
            fact=f"parallel.tp={tp}",
            rule=f"it must divide the {rows} rows that model.vocab_size={vocab_size} has when "
            f"padded to a multiple of model.make_vocab_size_divisible_by={multiple} (remainder {rows % tp})",
            remedy=f"set model.make_vocab_size_divisible_by={lcm(multiple, tp)} in a new run, or use a tp that "
            f"divides {multiple}",
        )
    ]


def _layers(pp: int, layers: int, stages: str) -> list[Fault]:
    if layers > MAX_LISTED:
        return [
            Fault(
                fact=f"model.num_layers={layers}",
                rule=f"tensors are listed layer by layer, for at most {MAX_LISTED:,} of them",
                remedy=f"use at most {MAX_LISTED}",
            )
        ]
    if pp <= layers or stages not in KINDS:
        return []
    return [
        Fault(
            fact=f"parallel.pp={pp}",
            rule=f"every rank needs a layer, and model.num_layers={layers}",
            remedy=f"use parallel.pp of at most {layers}, or place layers by parallel.stages",
        )
    ]


def _positions(seq_len: int, longest: int) -> list[Fault]:
    if seq_len <= longest:
        return []
    return [
        Fault(
            fact=f"data.seq_len={seq_len}",
            rule=f"it must not exceed model.max_positions={longest}",
            remedy=f"set model.max_positions={seq_len} or shorten the sequence",
        )
    ]


def _schedule(
    name: str,
    pp: int,
    chunks: int,
    microbatch_group_size_per_vp_stage: int | str,
    *others: int | float | str,
) -> list[Fault]:
    sizes = make_sizes(
        pp=pp,
        chunks=chunks,
        microbatch_group_size_per_vp_stage=microbatch_group_size_per_vp_stage,
        num_micro_batches=1,
    )
    by_field = dict(zip(SCHEDULING, (microbatch_group_size_per_vp_stage, *others), strict=True))
    given = {
        field: value
        for field, value in by_field.items()
        if value != default_of(f"schedule.{field}")
    }
    return schedule_faults(name, sizes) + unused_size_faults(name, chunks=chunks, given=given)


def _stages(
    name: str, pp: int, chunks: int, layers: int, *placing: str | int | bool
) -> list[Fault]:
    """Layers that cannot be placed as asked, and ranks that would hold nothing."""
    by_field: dict[str, Any] = dict(zip(PLACING, placing, strict=True))
    if layers > MAX_LISTED:
        return []  # told by the rule of layers
    if pp * chunks > MAX_LISTED:
        return [
            Fault(
                fact=f"parallel.pp={pp} with schedule.chunks={chunks}",
                rule=f"that is {pp * chunks} stages, which are listed one by one: at most "
                f"{MAX_LISTED:,}",
                remedy="use fewer ranks or chunks",
            )
        ]
    parallel = ParallelSection(**by_field)
    placement = make_placement(name, pp=pp, chunks=chunks)
    faults = placement_faults(parallel, num_layers=layers, num_stages=placement.num_stages)
    if faults or (pp > layers and parallel.stages in KINDS):
        return faults
    stages = make_stages(
        layer_counts(parallel, num_layers=layers, num_stages=placement.num_stages, loss_cost=0.0)
    )
    empty = [
        rank
        for rank in range(pp)
        if not any(stages[placement.stage(rank, c)].has_tensors for c in range(chunks))
    ]
    if not empty:
        return []
    return [
        Fault(
            fact=f"parallel.pp={pp} with schedule.chunks={chunks}",
            rule=f"every rank needs a layer, the embedding or the head, and rank {empty[0]} of the "
            f"pipeline gets none of model.num_layers={layers}",
            remedy="use fewer chunks or ranks, or place layers by parallel.stages",
        )
    ]


def _world(num_workers: int | str, *degrees: int) -> list[Fault]:
    if num_workers == "grid":
        return []
    tp, cp, dp, pp = degrees
    fault = world_fault(ParallelSection(tp=tp, cp=cp, dp=dp, pp=pp), int(num_workers))
    return [fault] if fault else []


def _grid(order: str, *degrees: int) -> list[Fault]:
    tp, cp, dp, ep, etp = degrees
    return grid_faults(ParallelSection(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, order=order))


RULES = (
    Rule(
        reads=("parallel.order", *(f"parallel.{a}" for a in ("tp", "cp", "dp", "ep", "etp"))),
        check=_grid,
    ),
    Rule(
        reads=("cluster.num_workers", "parallel.tp", "parallel.cp", "parallel.dp", "parallel.pp"),
        check=_world,
    ),
    Rule(reads=SHARDING_FIELDS, check=sharding_group_faults),
    _must_divide("tp", "num_heads"),
    Rule(
        reads=("parallel.tp", "model.ffn_hidden_size", "model.moe", "model.num_layers"),
        check=cut_width_faults,
    ),
    Rule(
        reads=("parallel.tp", "model.vocab_size", "model.make_vocab_size_divisible_by"),
        check=_table_rows,
    ),
    Rule(reads=("parallel.tp", "model.num_heads", "model.num_kv_heads"), check=_kv_heads),
    Rule(
        reads=("parallel.tp", "parallel.cp", "data.seq_len", "parallel.sequence_parallel"),
        check=position_faults,
    ),
    Rule(
        reads=(
            "parallel.cp",
            "parallel.cp_method",
            "parallel.hierarchical_cp_size",
            "parallel.tp",
            "model.num_heads",
            "model.num_kv_heads",
        ),
        check=exchange_faults,
    ),
    Rule(
        reads=("model.attention_dropout", "parallel.cp", "parallel.cp_method"),
        check=weight_dropout_faults,
    ),
    Rule(reads=("parallel.pp", "model.num_layers", "parallel.stages"), check=_layers),
    Rule(reads=("data.seq_len", "model.max_positions"), check=_positions),
    Rule(
        reads=(
            "model.attention_dropout",
            "data.seq_len",
            "model.num_heads",
            "parallel.tp",
            "parallel.cp",
            "schedule.micro_batch_size",
            "precision.dtype",
        ),
        check=attention_weight_faults,
    ),
    Rule(reads=("model.moe", "model.num_layers"), check=moe_faults),
    Rule(
        reads=("model.moe", "model.ffn_hidden_size", "parallel.ep", "parallel.etp"),
        check=expert_place_faults,
    ),
    Rule(
        reads=("model.moe", "parallel.dynamic_cp", "parallel.moe_token_dispatcher_type"),
        check=dynamic_faults,
    ),
    Rule(
        reads=(
            "parallel.overlap_moe_expert_parallel_comm",
            "parallel.sharding",
            "schedule.name",
            "parallel.pp",
            "schedule.chunks",
        ),
        check=overlap_faults,
    ),
    Rule(
        reads=(
            "model.moe",
            "parallel.tp",
            "parallel.cp",
            "data.seq_len",
            "schedule.micro_batch_size",
        ),
        check=expert_token_faults,
    ),
    Rule(
        reads=("checkpoint.keep_best", "checkpoint.every", "run.eval_every", "run.eval_samples"),
        check=keep_best_faults,
    ),
    Rule(
        reads=("checkpoint.buffer_bytes", "model.hidden_size", "model.ffn_hidden_size"),
        check=buffer_faults,
    ),
    Rule(reads=("cluster.host", "elastic.spares", "elastic.snapshot_every"), check=host_faults),
    Rule(
        reads=("elastic.spares", "parallel.tp", "parallel.is_tp_across_nodes_allowed"),
        check=lambda spares, tp, is_free: spares_faults(
            spares, tp, is_tp_across_nodes_allowed=is_free
        ),
    ),
    Rule(
        reads=("elastic.min_workers", "parallel.tp", "parallel.cp", "parallel.dp", "parallel.pp"),
        check=lambda least, *degrees: min_workers_faults(least, degrees),
    ),
    *(
        Rule(
            reads=(f"elastic.{name}",), check=lambda ratio, name=name: ratio_faults(**{name: ratio})
        )
        for name in ("spike_loss", "spike_grad_norm", "straggler_ratio")
    ),
    Rule(reads=("elastic.hang_timeout_min_s", "elastic.hang_timeout_max_s"), check=hang_faults),
    Rule(reads=("optimizer.lr_warmup_steps", "optimizer.lr_decay_steps"), check=lr_step_faults),
    Rule(
        reads=(
            "optimizer.lr_schedule",
            "optimizer.lr_warmup_steps",
            "optimizer.lr_cooldown_steps",
            "optimizer.lr_decay_steps",
            "run.steps",
        ),
        check=lr_schedule_faults,
    ),
    Rule(reads=("data.packing", "data.seq_len", "data.document_multiple"), check=packing_faults),
    *(
        Rule(reads=reads, check=check)
        for reads, check in DOCUMENT_CHECKS + HEAD_CHECKS + FP8_CHECKS
    ),
    Rule(reads=("data.packing", "model.attention_dropout"), check=packed_dropout_faults),
    Rule(reads=("data.batch_ramp", "data.global_batch_size"), check=batch_ramp_faults),
    Rule(reads=("memory.recompute", "memory.recompute_parts"), check=recompute_faults),
    Rule(reads=("precision.loss_scale", "precision.min_loss_scale"), check=loss_scale_faults),
    Rule(reads=init_from_rules.READS, check=init_from_rules.init_from_faults),
    Rule(
        reads=(
            "schedule.name",
            "parallel.pp",
            "schedule.chunks",
            *(f"schedule.{field}" for field in SCHEDULING),
        ),
        check=_schedule,
    ),
    Rule(
        reads=(
            "schedule.name",
            "parallel.pp",
            "schedule.chunks",
            "model.num_layers",
            *(f"parallel.{field}" for field in PLACING),
        ),
        check=_stages,
    ),
)
