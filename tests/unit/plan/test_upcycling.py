"""Experts that begin as dense layers: which, where, times what, and what is refused."""

import numpy as np
import pytest

from raymega.box import Box
from raymega.config.moe import MoeSection
from raymega.plan.upcycling import make_upcycling, upcycling_faults

D, F = 4, 12
DENSE = {
    "layers.0.mlp.up.weight": (F, D), "layers.0.mlp.down.weight": (D, F),
    "layers.1.mlp.up.weight": (F, D), "layers.1.mlp.down.weight": (D, F),
}  # fmt: skip


def _wanted(experts, width):
    """Block 0 stays dense, block 1 holds experts."""
    kept = {name: shape for name, shape in DENSE.items() if ".0." in name}
    return kept | {
        "layers.1.moe.experts.up.weight": (experts, width, D),
        "layers.1.moe.experts.down.weight": (experts, D, width),
        "layers.1.moe.router.weight": (experts, D),
        "layers.1.moe.router.bias": (experts,),
    }


def _make(intermediate_size=F, given=DENSE, **moe):
    section, wanted = (
        MoeSection(**{"num_experts": 6, **moe}),
        _wanted(moe.get("num_experts", 6), intermediate_size),
    )
    upcycling = make_upcycling(section, given, wanted)
    return upcycling, [str(fault) for fault in upcycling_faults(upcycling, given, wanted)]


def test_sources_are_dense_layers_of_blocks_that_hold_experts():
    upcycling, faults = _make()
    assert faults == [] and upcycling.granularity == 1
    assert upcycling.sources == {
        f"layers.1.moe.experts.{n}.weight": f"layers.1.mlp.{n}.weight" for n in ("up", "down")
    }
    assert upcycling.routers == {f"layers.1.moe.router.{n}" for n in ("weight", "bias")}


@pytest.mark.parametrize("width", [F, F // 2])
def test_biases_of_experts_start_as_the_dense_layer_s_or_are_refused(width):
    given = DENSE | {"layers.1.mlp.up.bias": (F,), "layers.1.mlp.down.bias": (D,)}
    ends = {"up.bias": (6, width), "down.bias": (6, D)}
    wanted = _wanted(6, width) | {f"layers.1.moe.experts.{end}": at for end, at in ends.items()}
    moe = MoeSection(num_experts=6, routed_scaling_factor=2.0)
    upcycling = make_upcycling(moe, given, wanted)
    faults = [str(fault) for fault in upcycling_faults(upcycling, given, wanted)]
    if width < F:
        assert "each of them would add the whole last bias" in faults[0]
        return
    factors = {end: upcycling.factor(f"layers.1.moe.experts.{end}") for end in ends}
    assert faults == [] and factors == {"up.bias": 1.0, "down.bias": 0.5}


def test_experts_that_weigh_their_inputs_do_not_start_as_a_dense_layer():
    assert "read less than the dense layer" in _make(apply_probs_on_input=True)[1][0]


@pytest.mark.parametrize("name", ["up", "down"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_boxes_of_a_dense_block_put_its_elements_where_experts_have_them(name, parts):
    upcycling, faults = _make(intermediate_size=F // parts, top_k=parts)
    assert faults == []
    dense = np.arange(F * D).reshape(DENSE[f"layers.1.mlp.{name}.weight"])
    shape = _wanted(6, F // parts)[f"layers.1.moe.experts.{name}.weight"]
    found, times = np.full(shape, -1), np.zeros(shape, dtype=int)
    whole = Box(offset=(0, 0, 0), shape=shape)
    for first, last in ((0, 1), (1, 3), (3, dense.shape[0])):
        saved = Box(offset=(first, 0), shape=(last - first, dense.shape[1]))
        values = dense[first:last]
        for placed in upcycling.boxes(f"layers.1.moe.experts.{name}.weight", saved, shape):
            common = placed.intersect(whole)
            found[common.within(whole)] = values[None][common.within(placed)]
            times[common.within(whole)] += 1
    assert (times == 1).all()
    split = np.split(dense, parts, axis=1 if name == "down" else 0)
    assert all((found[e] == split[e % parts]).all() for e in range(6))


@pytest.mark.parametrize(
    ("moe", "width", "factor"),
    [
        ({}, F, 1.0),
        ({"routed_scaling_factor": 2.5}, F, 0.4),
        ({}, F // 2, 2.0),
        ({"norm_topk_prob": False, "top_k": 2}, F // 2, 6 * 2 / 2),
        ({"norm_topk_prob": False, "top_k": 4, "router_score_function": "sigmoid"}, F // 2, 1.0),
    ],
)
def test_weights_of_a_copy_and_what_the_experts_are_scaled_by_make_one(moe, width, factor):
    upcycling, faults = _make(width, **moe)
    assert faults == []
    assert upcycling.factor("layers.1.moe.experts.down.weight") == pytest.approx(factor)
    assert upcycling.factor("layers.1.moe.experts.up.weight") == 1.0
    assert upcycling.factor("layers.0.mlp.down.weight") == 1.0


def test_parts_of_a_copy_have_one_row_of_the_router():
    upcycling, _ = _make(F // 3, top_k=3)
    assert [upcycling.router_row(expert) for expert in range(6)] == [0, 0, 0, 3, 3, 3]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"intermediate_size": 5}, "is (12, 4), layers.1.moe.experts.up.weight is (6, 5, 4)"),
        ({"intermediate_size": 3}, "model.moe.num_experts=6; 4 experts are one copy"),
        ({"intermediate_size": 6, "top_k": 3}, "model.moe.top_k=3; 2 experts are one copy"),
        (
            {"intermediate_size": 6, "n_group": 2, "topk_group": 1},
            "n_group=2; 2 experts are one copy",
        ),
        ({"given": {}}, "here is no block that has experts and was dense"),
    ],
    ids=["no part", "experts", "choices", "groups", "nothing"],
)
def test_what_would_not_begin_as_the_dense_model_is_refused(fields, told):
    assert any(told in fault for fault in _make(**fields)[1])
