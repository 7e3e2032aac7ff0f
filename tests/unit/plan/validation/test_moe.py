"""Rules of mixture of experts, each met by one job that breaks it and told with its numbers."""

import pytest

from raymega.config.attention import AttentionSection
from raymega.config.load import parse_mapping
from raymega.config.moe import MoeSection
from raymega.plan.validation.moe import (
    expert_place_faults,
    expert_token_faults,
    moe_faults,
    overlap_faults,
)

DEEPSEEK = {
    "num_experts": 256, "top_k": 8, "router_score_function": "sigmoid", "routed_scaling_factor": 2.5, "n_group": 8,
    "topk_group": 4, "group_score": "top2", "shared_expert_intermediate_size": 2048, "first_k_dense_replace": 3,
    "expert_bias": True, "expert_bias_update_rate": 1e-3, "load_balancing_type": "sequence", "router_aux_loss_coef": 1e-4,
}  # fmt: skip


def _faults(num_layers=61, **fields):
    return [
        str(fault) for fault in moe_faults(MoeSection(**fields), num_layers, AttentionSection())
    ]


def test_known_models_are_legal():
    assert _faults() == []
    assert _faults(**DEEPSEEK) == []
    assert (
        _faults(num_experts=8, load_balancing_type="micro_batch", router_aux_loss_coef=0.02) == []
    )
    assert _faults(num_experts=8, top_k=1, norm_topk_prob=False, capacity_factor=1.25) == []


@pytest.mark.parametrize("name", sorted(set(MoeSection.model_fields) - {"num_experts"}))
def test_no_field_means_anything_in_a_dense_model(name):
    plain = getattr(MoeSection(), name)
    others = {"softmax": "sigmoid", "max": "top2", "float32": "float64", "none": "global",
              "probability": "position", "ffn_hidden_size": 8}  # fmt: skip
    other = others.get(plain) or (not plain if isinstance(plain, bool) else 0.5)
    if type(plain) is int:
        other = plain + 1
    (fault,) = _faults(**{name: other})
    assert f"model.moe.{name}={other!r}" in fault and "num_experts=0" in fault


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"top_k": 9}, "top_k=9; a token chooses among model.moe.num_experts=8; use at most 8"),
        ({"top_k": 1}, "a single score divided by itself is 1"),
        ({"top_k": 4, "n_group": 4, "topk_group": 1}, "the 2 experts of 1 groups"),
        ({"n_group": 3, "topk_group": 2}, "must divide model.moe.num_experts=8 (remainder 2)"),
        ({"n_group": 2, "topk_group": 2}, "a choice of groups must leave some out"),
        (
            {"n_group": 8, "topk_group": 2, "group_score": "top2"},
            "n_group=8; it adds the scores of two experts of a group, and a group of num_experts / "
            "n_group = 8 / 8 holds 1; use at most 4 groups, or set model.moe.group_score=max",
        ),
        ({"topk_group": 2}, "with model.moe.n_group=1 it does nothing"),
        (
            {"shared_expert_gate": True},
            "where model.moe.shared_expert_intermediate_size is 0 it does nothing",
        ),
        ({"expert_bias_update_rate": 0.1}, "where model.moe.expert_bias is false it does nothing"),
        ({"token_drop_policy": "position"}, "where model.moe.capacity_factor is 0 it does nothing"),
        ({"pad_expert_input_to_capacity": True}, "where model.moe.capacity_factor is 0"),
        (
            {"sinkhorn_rounds": 3},
            "where model.moe.load_balancing_type is not sinkhorn it does nothing",
        ),
        (
            {"router_aux_loss_coef": 0.1},
            "where model.moe.load_balancing_type is no loss it does nothing",
        ),
        (
            {"load_balancing_type": "global"},
            "with model.moe.router_aux_loss_coef=0 its loss does nothing",
        ),
        (
            {"load_balancing_type": "sinkhorn", "expert_bias": True},
            "sinkhorn evens out the choice by itself",
        ),
        ({"first_k_dense_replace": 61}, "of model.num_layers=61 blocks none would hold experts"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_every_rule_tells_its_numbers(fields, told):
    faults = _faults(**{"num_experts": 8, **fields})
    assert len(faults) == 1 and told in faults[0], faults


def test_every_so_many_blocks_hold_experts():
    def places(**fields):
        moe = MoeSection(num_experts=4, **fields)
        return [layer for layer in range(7) if moe.holds_experts(layer)]

    assert places() == [*range(7)]
    assert places(layer_freq=2) == [1, 3, 5]
    assert places(first_k_dense_replace=3) == [3, 4, 5, 6]
    assert places(first_k_dense_replace=1, layer_freq=3) == [3, 6]
    assert not MoeSection().holds_experts(0)


def test_tensor_parallel_ranks_share_out_tokens():
    moe = MoeSection(num_experts=4)
    assert expert_token_faults(moe, 4, 2, 8, 1) == []
    (fault,) = expert_token_faults(moe, 4, 1, 9, 2)
    assert "= 18 that they hold (remainder 2)" in str(fault)
    assert expert_token_faults(MoeSection(), 4, 1, 9, 2) == []


def test_a_section_inside_a_section_is_read_field_by_field():
    raw = {"model": {"moe": {"top_k": "two", "nmu_experts": 4, "router_score_function": "tanh"}}}
    texts = "\n".join(map(str, parse_mapping(raw).faults))
    assert "model.moe.nmu_experts is not a known key" in texts
    assert "did you mean model.moe.num_experts?" in texts
    assert "model.moe.top_k='two'" in texts and "model.moe.router_score_function='tanh'" in texts
    (fault,) = [f for f in parse_mapping({"model": {"moe": 4}}).faults if "moe" in str(f)]
    assert "model.moe=4; it must be a mapping" in str(fault)
    values = parse_mapping({"model": {"moe": {"num_experts": 4}}}).values
    assert values["model.moe"] == MoeSection(num_experts=4)


def _place_faults(moe, *, ep, etp):
    return expert_place_faults(
        moe, ffn_hidden_size=64, family="llama", hidden_size=64, ep=ep, etp=etp
    )


def test_experts_and_their_features_are_cut_evenly():
    moe = MoeSection(num_experts=8)
    assert _place_faults(moe, ep=8, etp=4) == []
    ep, etp = map(str, _place_faults(moe, ep=3, etp=5))
    assert "parallel.ep=3; experts are shared out evenly, so it must divide" in ep
    assert "model.moe.num_experts=8 (remainder 2); use one of 1, 2, 4, 8" in ep
    assert "parallel.etp=5" in etp and "divide model.ffn_hidden_size=64 (remainder 4)" in etp
    (fault,) = _place_faults(MoeSection(num_experts=8, intermediate_size=6), ep=1, etp=4)
    assert "divide model.moe.intermediate_size=6 (remainder 2)" in str(fault)


def test_experts_axes_of_a_dense_model_are_refused():
    faults = _place_faults(MoeSection(), ep=2, etp=2)
    assert [fault.fact for fault in faults] == ["parallel.ep=2", "parallel.etp=2"]
    assert all("num_experts=0 is a dense model" in fault.rule for fault in faults)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((False, "parameters", "gpipe", 4, 1), []),
        ((True, "gradients", "1f1b", 1, 1), []),
        ((True, "none", "dualpipe_v", 4, 2), []),
        ((True, "none", "1f1b", 2, 1), ["schedule.name=1f1b, parallel.pp=2, schedule.chunks=1"]),
        ((True, "none", "1f1b", 1, 2), ["schedule.chunks=2"]),
        ((True, "parameters", "dualpipe_v", 4, 2), ["with parallel.sharding=parameters"]),
    ],
    ids=str,
)
def test_passes_take_turns_only_where_none_waits_for_pairs_of_others(asked, told):
    faults = [str(fault) for fault in overlap_faults(*asked)]
    assert len(faults) == len(told)
    assert all(part in fault for fault, part in zip(faults, told, strict=True))
