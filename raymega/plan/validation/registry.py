"""List the rules between the values of a job, in the order in which their faults are reported.

A rule checks what no single field can break; it is a function in the module of its subject in this folder
(see ``rule.py``). It runs when all the fields that it reads have parsed. Checks that need data or a store
are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from raymega.errors import Fault
from raymega.plan.distillation.teacher import has_teacher, teacher_values
from raymega.plan.validation import (
    attention,
    checkpoint,
    context_parallel,
    data,
    elastic,
    evaluation,
    grid,
    layers,
    moe,
    pipeline,
    precision,
    tensor_parallel,
    tracking,
    training,
    tuning,
)
from raymega.plan.validation.distillation import rules as distillation
from raymega.plan.validation.families import encoder_decoder, layer_sizes, vision
from raymega.plan.validation.heads import rules
from raymega.plan.validation.plugins import without_broken_parts
from raymega.plan.validation.rule import Rule
from raymega.plan.validation.unused_fields import PARTNER_FIELDS, unused_faults

COUNTS: tuple[Rule, ...] = (pipeline.count_faults, vision.count_faults)
"""Rules of numbers of layers: where one is broken, the others are not asked, since they list each layer."""
RULES: tuple[Rule, ...] = (
    *COUNTS,
    grid.grid_faults,
    grid.world_faults,
    grid.size_faults,
    grid.sharding_group_faults,
    tensor_parallel.head_faults,
    tensor_parallel.cut_width_faults,
    tensor_parallel.vocabulary_faults,
    tensor_parallel.kv_head_faults,
    context_parallel.position_faults,
    context_parallel.exchange_faults,
    context_parallel.weight_dropout_faults,
    pipeline.layer_faults,
    pipeline.pass_faults,
    attention.position_faults,
    attention.weight_faults,
    moe.moe_faults,
    moe.expert_place_faults,
    context_parallel.dynamic_moe_faults,
    moe.overlap_faults,
    moe.expert_token_faults,
    checkpoint.keep_best_faults,
    checkpoint.buffer_faults,
    elastic.host_faults,
    elastic.spares_faults,
    elastic.min_workers_faults,
    *elastic.RATIO_RULES,
    elastic.hang_faults,
    training.budget_faults,
    training.sample_faults,
    training.lr_step_faults,
    training.lr_schedule_faults,
    data.source_faults,
    data.stage_faults,
    data.validation_faults,
    evaluation.task_faults,
    evaluation.task_place_faults,
    training.packing_faults,
    context_parallel.document_faults,
    context_parallel.dynamic_faults,
    context_parallel.dynamic_length_faults,
    attention.head_width_faults,
    attention.rope_scaling_faults,
    attention.mla_faults,
    attention.indexer_faults,
    attention.index_length_faults,
    attention.score_scale_faults,
    attention.mtp_faults,
    layer_sizes.list_faults,
    layer_sizes.part_faults,
    layer_sizes.cut_faults,
    layers.window_faults,
    attention.linear_faults,
    attention.block_kind_faults,
    attention.linear_head_faults,
    layers.layer_rope_faults,
    layers.score_rule_faults,
    layers.family_faults,
    layers.decoder_faults,
    layers.mask_faults,
    layers.next_token_faults,
    encoder_decoder.other_family_faults,
    encoder_decoder.side_faults,
    encoder_decoder.length_faults,
    encoder_decoder.table_faults,
    encoder_decoder.span_faults,
    encoder_decoder.cut_faults,
    encoder_decoder.model_option_faults,
    encoder_decoder.run_option_faults,
    vision.idle_vision_faults,
    vision.vision_size_faults,
    vision.several_size_faults,
    vision.image_length_faults,
    vision.vision_option_faults,
    vision.vision_run_faults,
    vision.mrope_faults,
    vision.augment_faults,
    vision.tower_cut_faults,
    precision.fp8_dtype_faults,
    precision.fp8_block_faults,
    precision.fp8_head_faults,
    context_parallel.dynamic_fp8_faults,
    attention.packed_dropout_faults,
    training.batch_ramp_faults,
    training.recompute_faults,
    precision.loss_scale_faults,
    checkpoint.init_from_faults,
    pipeline.sizes_faults,
    pipeline.stage_faults,
    tracking.tracker_count_faults,
    tracking.tracker_faults,
    tuning.pattern_faults,
    tuning.idle_faults,
    tuning.expert_adapter_faults,
    tuning.overlap_faults,
    tuning.base_block_faults,
    tuning.noise_faults,
    tuning.adapter_use_faults,
    tuning.idle_preference_faults,
    tuning.row_faults,
    tuning.token_loss_faults,
    tuning.reference_faults,
    rules.idle_head_faults,
    rules.embedding_faults,
    rules.lone_pair_faults,
    rules.headless_faults,
    rules.head_row_faults,
    rules.head_part_faults,
    rules.reward_faults,
    distillation.objective_faults,
    distillation.vocabulary_faults,
    distillation.vision_faults,
    distillation.stored_faults,
)

_Check = Callable[[Mapping[str, Any]], list[Fault]]


def job_faults(values: Mapping[str, Any]) -> list[Fault]:
    """Return the faults of every rule whose fields are all in ``values`` (dotted path to value)."""
    # A field that did not parse is not in ``values``; its own fault is reported elsewhere. So is that of a part
    # that is not there, whose facts no rule can read.
    values, faults = without_broken_parts(values)
    if too_many := _faults_of(COUNTS, values):
        return faults + too_many
    faults += _faults_of(RULES, values)
    return faults + unused_faults(values)


def _faults_of(rules: Sequence[Rule], values: Mapping[str, Any]) -> list[Fault]:
    """Return the faults of ``rules``, and those of a live teacher's model that the job itself has not."""
    own = [fault for rule in rules for fault in rule.faults_of(values)]
    if not has_teacher(values):
        return own
    teacher = teacher_values(values)
    found = [fault for rule in rules for fault in rule.faults_of(teacher)]
    return own + [
        replace(
            fault,
            fact=f"of the teacher, distillation.teacher_model: {fault.fact}",
            # its layers are spread evenly, wherever the job's own are
            remedy=fault.remedy.replace(pipeline.BY_STAGES, ""),
        )
        for fault in found
        if fault not in own
    ]


def fault_counter(
    values: Mapping[str, Any], varied: Collection[str]
) -> Callable[[Mapping[str, Any]], int]:
    """Return a function of the values of the fields ``varied`` to the number of :func:`job_faults`.

    Each rule is asked once for equal values of those among its fields, so that thousands of layouts of a job are
    cheap.

    Args:
        values: Values of the job, by dotted path.
        varied: Fields that have other values each time, all hashable; none of them names a part.
    """
    left, broken = without_broken_parts(values)
    checks: list[tuple[tuple[str, ...], _Check]] = [(r.reads, r.faults_of) for r in RULES]
    if has_teacher(left):
        # a fault of both counts twice, which is as far from none as once
        checks += [(rule.reads, _of_teacher(rule)) for rule in RULES]
    checks.append((PARTNER_FIELDS, unused_faults))
    # what no varied field bears on is counted here, once and for all
    always = len(broken)
    depending: list[tuple[Callable[..., Any], _Check, dict[Any, int]]] = []
    for reads, check in checks:
        if own := [path for path in reads if path in varied]:
            found: dict[Any, int] = {}
            depending.append((itemgetter(*own), check, found))
        else:
            always += len(check(left))

    def count(changes: Mapping[str, Any]) -> int:
        changed, total = {**left, **changes}, always
        for key_of, check, known in depending:
            key = key_of(changes)
            if key not in known:
                known[key] = len(check(changed))
            total += known[key]
        return total

    return count


def _of_teacher(rule: Rule) -> Callable[[Mapping[str, Any]], list[Fault]]:
    return lambda values: rule.faults_of(teacher_values(values))
