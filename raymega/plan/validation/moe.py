"""Check the rules of mixture of experts: what routing needs, and fields without effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raymega.config.attention import AttentionSection, LayerTypes
from raymega.config.moe import AUX_LEVELS, MoeSection
from raymega.errors import Fault
from raymega.plan.layers.family_parts import family_parts
from raymega.plan.layers.layer_pattern import EXPERTS
from raymega.plan.validation.rule import divisors, reads
from raymega.schedule.table import can_pair


@reads("model.moe num_layers attention")
def moe_faults(moe: MoeSection, num_layers: int, attention: AttentionSection) -> Iterator[Fault]:
    """Check the section by itself: values that contradict each other, and those without effect."""
    if not moe.num_experts:
        yield from _dense_faults(moe)
        return
    yield from _place_faults(moe, num_layers, attention.layer_types)
    yield from _choice_faults(moe)
    yield from _group_faults(moe)
    yield from _idle_faults(moe)
    yield from _balance_faults(moe)


@reads("model.moe, parallel.tp cp, data.seq_len, schedule.micro_batch_size")
def expert_token_faults(
    moe: MoeSection, tp: int, cp: int, seq_len: int, rows: int
) -> Iterator[Fault]:
    """Check that tp divides the tokens that its ranks route, with sequence parallelism or without."""
    tokens = seq_len // cp * rows
    if not moe.num_experts or tokens % tp == 0:
        return
    yield Fault(
        fact=f"parallel.tp={tp} with model.moe.num_experts={moe.num_experts}",
        rule="tp ranks route an equal share of tokens each, so it must divide the "
        f"schedule.micro_batch_size={rows} * data.seq_len={seq_len} / parallel.cp={cp} = {tokens} "
        f"that they hold (remainder {tokens % tp})",
        remedy=f"set data.seq_len to a multiple of {tp * cp}, or another parallel.tp",
    )


@reads("model.moe ffn_hidden_size family hidden_size, parallel.ep etp")
def expert_place_faults(  # fields of one rule
    moe: MoeSection, ffn_hidden_size: int, family: str, hidden_size: int, ep: int, etp: int
) -> Iterator[Fault]:
    """Check that ep divides the experts, and etp the features of each."""
    # a dense model
    if not moe.num_experts:
        for axis, degree in (("ep", ep), ("etp", etp)):
            if degree > 1:
                yield Fault(
                    fact=f"parallel.{axis}={degree}",
                    rule="model.moe.num_experts=0 is a dense model, without experts to cut",
                    remedy=f"set parallel.{axis}=1, or model.moe.num_experts",
                )
        return
    # an expert's width is the dense layer's, unless it has one of its own
    field, width = "model.ffn_hidden_size", ffn_hidden_size
    if moe.intermediate_size != "ffn_hidden_size":
        field, width = "model.moe.intermediate_size", moe.intermediate_size
    # axis, degree, what it must divide, the field of that, and why
    rules = [
        ("ep", ep, moe.num_experts, "model.moe.num_experts", "experts are shared out evenly"),
        ("etp", etp, width, field, "the features of each expert are cut evenly"),
    ]
    if "moe.experts.down" in family_parts(family).biased:
        rules.append(
            ("etp", etp, hidden_size, "model.hidden_size", "each rank adds its columns of the bias")
        )
    for axis, degree, number, what, why in rules:
        if number % degree:
            yield Fault(
                fact=f"parallel.{axis}={degree}",
                rule=f"{why}, so it must divide {what}={number} (remainder {number % degree})",
                remedy=f"use one of {divisors(number)}",
            )


@reads(
    "parallel.overlap_moe_expert_parallel_comm sharding, schedule.name, parallel.pp, schedule.chunks"
)
def overlap_faults(
    is_overlapped: bool, sharding: str, schedule: str, pp: int, chunks: int
) -> Iterator[Fault]:
    """Check that the schedule pairs passes, and that sharding allows two at once, for their overlap."""
    if not is_overlapped:
        return
    # a schedule that puts a forward next to a backward
    if not can_pair(schedule, pp=pp, chunks=chunks):
        yield Fault(
            fact=f"parallel.overlap_moe_expert_parallel_comm=true with schedule.name={schedule}, parallel.pp={pp}, "
            f"schedule.chunks={chunks}",
            rule="a forward and a backward of another micro-batch lie side by side in dualpipe_v, and "
            "in 1f1b with pp=1 and chunks=1; elsewhere ranks would wait for each other's pairs",
            remedy="set schedule.name=dualpipe_v and schedule.chunks=2, or overlap_moe_expert_parallel_comm=false",
        )
    # ZeRO-3 frees a unit's weights after one pass
    if sharding == "parameters":
        yield Fault(
            fact="parallel.overlap_moe_expert_parallel_comm=true with parallel.sharding=parameters",
            rule="weights are gathered for one pass at a time, and let go of after it",
            remedy="set parallel.sharding=gradients, or overlap_moe_expert_parallel_comm=false",
        )


def _dense_faults(moe: MoeSection) -> Iterator[Fault]:
    for name, value in _set_fields(moe).items():
        yield _fault(
            f"{name}={value!r}",
            "model.moe.num_experts=0 is a dense model, where it does nothing",
            f"set model.moe.num_experts, or remove model.moe.{name}",
        )


def _place_faults(moe: MoeSection, num_layers: int, kinds: LayerTypes) -> Iterator[Fault]:
    if EXPERTS in kinds or any(moe.holds_experts(layer) for layer in range(num_layers)):
        return
    yield _fault(
        f"first_k_dense_replace={moe.first_k_dense_replace} with layer_freq={moe.layer_freq}",
        f"of model.num_layers={num_layers} blocks none would hold experts",
        "use fewer dense layers or a smaller layer_freq, or set model.moe.num_experts=0",
    )


def _choice_faults(moe: MoeSection) -> Iterator[Fault]:
    # top_k among all experts, or among those of the chosen groups
    in_groups = moe.num_experts // moe.n_group * moe.topk_group
    reach, what = moe.num_experts, f"model.moe.num_experts={moe.num_experts}"
    if moe.topk_group < moe.n_group and moe.num_experts % moe.n_group == 0:
        reach, what = in_groups, f"the {in_groups} experts of {moe.topk_group} groups"
    if moe.top_k > reach:
        yield _fault(f"top_k={moe.top_k}", f"a token chooses among {what}", f"use at most {reach}")
    # normalisation of a single score
    if moe.top_k == 1 and moe.norm_topk_prob:
        yield _fault(
            "top_k=1 with norm_topk_prob=true",
            "a single score divided by itself is 1, and the router would learn nothing",
            "set model.moe.norm_topk_prob=false",
        )


def _group_faults(moe: MoeSection) -> Iterator[Fault]:
    groups, top, experts = moe.n_group, moe.topk_group, moe.num_experts
    # without groups: fields without effect
    if groups == 1:
        for name, value in _set_fields(moe, "topk_group", "group_score").items():
            yield _fault(
                f"{name}={value}",
                "with model.moe.n_group=1 it does nothing",
                f"set model.moe.n_group, or remove model.moe.{name}",
            )
        return
    # with groups: equal size, a true choice, and enough experts for top2
    if experts % groups:
        yield _fault(
            f"n_group={groups}",
            f"groups are equally large, so it must divide model.moe.num_experts={experts} "
            f"(remainder {experts % groups})",
            f"use one of {divisors(experts, least=2)}",
        )
    if top >= groups:
        yield _fault(
            f"topk_group={top} with n_group={groups}",
            "a choice of groups must leave some out",
            f"use at most {groups - 1}, or set model.moe.n_group=1",
        )
    if moe.group_score == "top2" and experts // groups < 2:
        yield _fault(
            f"group_score=top2 with n_group={groups}",
            f"it adds the scores of two experts of a group, and a group of num_experts / n_group "
            f"= {experts} / {groups} holds {experts // groups}",
            f"use at most {experts // 2} groups, or set model.moe.group_score=max",
        )


def _idle_faults(moe: MoeSection) -> Iterator[Fault]:
    """Yield the faults of fields that have no effect because another field is not set."""
    is_shared, has_capacity = moe.shared_expert_intermediate_size > 0, moe.capacity_factor > 0
    balance = moe.load_balancing_type
    # field: whether it has an effect, and why not
    partners = {
        "shared_expert_gate": (is_shared, "shared_expert_intermediate_size is 0"),
        "router_aux_loss_coef": (balance in AUX_LEVELS, "load_balancing_type is no loss"),
        "sinkhorn_rounds": (balance == "sinkhorn", "load_balancing_type is not sinkhorn"),
        "expert_bias_update_rate": (moe.expert_bias, "expert_bias is false"),
        "token_drop_policy": (has_capacity, "capacity_factor is 0"),
        "pad_expert_input_to_capacity": (has_capacity, "capacity_factor is 0"),
    }
    for name, value in _set_fields(moe, *partners).items():
        is_used, partner = partners[name]
        if not is_used:
            yield _fault(
                f"{name}={value!r}",
                f"where model.moe.{partner} it does nothing",
                f"remove it, or set model.moe.{partner.partition(' ')[0]}",
            )


def _balance_faults(moe: MoeSection) -> Iterator[Fault]:
    # an auxiliary loss needs a coefficient
    if moe.load_balancing_type in AUX_LEVELS and not moe.router_aux_loss_coef:
        yield _fault(
            f"load_balancing_type={moe.load_balancing_type}",
            "with model.moe.router_aux_loss_coef=0 its loss does nothing",
            "set model.moe.router_aux_loss_coef=0.01, or model.moe.load_balancing_type=none",
        )
    # sinkhorn allows no other method of balance
    if moe.load_balancing_type != "sinkhorn":
        return
    for name, value in _set_fields(moe, "expert_bias", "n_group").items():
        yield _fault(
            f"load_balancing_type=sinkhorn with {name}={value}",
            "sinkhorn evens out the choice by itself, over all experts",
            f"remove model.moe.{name}, or set another model.moe.load_balancing_type",
        )


def _set_fields(moe: MoeSection, *names: str) -> dict[str, Any]:
    """Return the values of ``names``, or of all fields, that differ from their defaults."""
    values = {name: getattr(moe, name) for name in names or MoeSection.model_fields}
    return {name: v for name, v in values.items() if v != MoeSection.model_fields[name].default}


def _fault(fact: str, rule: str, remedy: str) -> Fault:
    return Fault(fact=f"model.moe.{fact}", rule=rule, remedy=remedy)
