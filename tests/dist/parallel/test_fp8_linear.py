"""Linear layers in fp8: cut ones equal whole ones written from the formulas, and runs equal one rank's."""

from functools import cache

import pytest
import torch

from raymega.parallel.tensor_parallel.fp8_linear import Fp8
from raymega.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from raymega.plan.layers.global_tensor import GlobalTensor
from tests.support.jobs import T5, layout_overrides
from tests.support.ranks import run_grid
from tests.support.references import plain_models
from tests.support.tolerances import FLOAT64_LAYER
from tests.support.training import assert_same_run, train
from tests.unit.model.parts import make_factory

pytestmark = pytest.mark.dist

S, B, IN, OUT = 8, 3, 24, 16
MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def _tensor(name, *shape, tp_dim):
    return GlobalTensor(
        name=name, shape=shape, tp_dim=tp_dim, init="normal", initializer_range=1.0, role="matrix"
    )


LAYERS = {
    "column": [_tensor("a.weight", OUT, IN, tp_dim=0), _tensor("a.bias", OUT, tp_dim=0)],
    "row": [_tensor("a.weight", OUT, IN, tp_dim=1), _tensor("a.bias", OUT, tp_dim=-1)],
}


def _draw(seed, *shape):
    """Rows of widely different size."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(*shape[:-1], 1, generator=generator).mul(3).exp()
    return (torch.randn(shape, generator=generator) * size).double()


def _rounded(x, dim, dtype):
    """x in fp8 and back, with a scale for each row along ``dim``, or one for all."""
    most = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = most / MOST[dtype]
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    values = values[values.isfinite()].unique()
    return values[((x / scale).unsqueeze(-1) - values).abs().argmin(-1)] * scale


def _wanted(recipe, weights):
    """Output, and gradients of input, weight and bias, of the whole layer."""
    x, grad = _draw(1, S, B, IN), _draw(2, S, B, OUT)
    w, bias = weights["a.weight"], weights["a.bias"]
    e4m3, e5m2 = MOST
    if recipe == "rowwise":
        y = _rounded(x, -1, e4m3) @ _rounded(w, 1, e4m3).T
        grad_x = _rounded(grad, -1, e4m3) @ _rounded(w, 0, e4m3)
        of_grad, of_x = grad, x
    else:
        of_grad, of_x, w = (
            _rounded(grad, None, e5m2), _rounded(x, None, e4m3), _rounded(w, None, e4m3)
        )  # fmt: skip
        y, grad_x = of_x @ w.T, of_grad @ w
    grad_w = of_grad.flatten(0, 1).T @ of_x.flatten(0, 1)
    return y + bias, grad_x, grad_w, grad.sum((0, 1))


def _part(x, dim, group, *, is_cut):
    return (x.chunk(group.size, dim)[group.index] if is_cut else x).clone()


def _run(env, is_sp):
    tp, found = env.groups.tp, {}
    sp = SequenceParallel(tp=tp, is_sequence_parallel=is_sp)
    for recipe in ("rowwise", "tensorwise"):
        for name, kind in (("column", ColumnParallelLinear), ("row", RowParallelLinear)):
            is_column = name == "column"
            fp8 = Fp8(by_row=recipe == "rowwise", micro=env.groups.micro)
            layer = kind(make_factory(LAYERS[name], sp=sp, fp8=fp8), "a")
            plain_models.fill(layer.parameters(), plain_models.draw_weights(LAYERS[name]))
            x, grad = _draw(1, S, B, IN), _draw(2, S, B, OUT)
            if is_column:
                x, grad = _part(x, 0, tp, is_cut=is_sp), _part(grad, -1, tp, is_cut=True)
            else:
                x, grad = _part(x, -1, tp, is_cut=True), _part(grad, 0, tp, is_cut=is_sp)
            y = layer(x.requires_grad_())
            y.backward(grad)
            blocks = plain_models.gradient_blocks(layer.parameters())
            found[recipe, name] = y.detach(), x.grad, blocks
    return found


def _joined(parts, dim, *, is_cut):
    return torch.cat(parts, dim) if is_cut else parts[0]


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_cut_layers_equal_whole_ones_from_the_formulas(tp, sp):
    results = run_grid(_run, Grid(tp=tp), sp)
    for recipe, name in results[0]:
        found, is_column = [result[recipe, name] for result in results], name == "column"
        weights = plain_models.draw_weights(LAYERS[name])
        y, grad_x, grad_w, grad_b = _wanted(recipe, weights)
        ends = [
            ([f[0] for f in found], y, -1 if is_column else 0, is_column or sp),
            ([f[1] for f in found], grad_x, 0 if is_column else -1, sp or not is_column),
        ]
        for parts, wanted, dim, is_cut in ends:
            assert (
                plain_models.difference(_joined(parts, dim, is_cut=is_cut), wanted) < FLOAT64_LAYER
            )
        whole = plain_models.assemble(weights, [block for *_, held in found for block in held])
        assert plain_models.difference(whole["a.weight"], grad_w) < FLOAT64_LAYER, (recipe, name)
        assert plain_models.difference(whole["a.bias"], grad_b) < FLOAT64_LAYER, (recipe, name)


TENSORWISE = ("schedule.micro_batch_size=2",)
MLA = (
    "model.num_kv_heads=num_heads", "model.mla={kv_lora_rank: 8, q_lora_rank: 6, qk_nope_head_dim: 4, "
    "qk_rope_head_dim: 2, v_head_dim: 3}",
)  # fmt: skip
EXPERTS = (
    "model.moe.num_experts=4",
    "model.moe.top_k=2",
    "model.moe.intermediate_size=24",
    "model.moe.shared_expert_intermediate_size=16",
)
T5_IN_FP8 = (*T5, "precision.fp8_end_blocks=0")
OFFLOADED = ("memory.offload=[activations,optimizer]",)
CASES = [
    (
        "rowwise",
        EXPERTS,
        "tp2-dp2-ep2-etp2-sp",
        ("parallel.sharding=gradients", "schedule.micro_batch_size=1"),
    ),
    (
        "rowwise",
        EXPERTS,
        "dp4-ep4",
        ("parallel.sharding=parameters", "parallel.moe_token_dispatcher_type=all_gather"),
    ),
    (
        "rowwise",
        EXPERTS,
        "tp4-etp4",
        ("memory.recompute=selective", "memory.recompute_parts=[activation]"),
    ),
    ("tensorwise", (*TENSORWISE, *EXPERTS), "tp2-cp2-etp2-ep2", OFFLOADED),
    ("rowwise", (), "tp2-pp2-dp2-sp", ("parallel.sharding=parameters", "schedule.name=zb_h1")),
    ("rowwise", (), "cp2-dp2", ("memory.recompute=full", "schedule.micro_batch_size=1")),
    ("rowwise", MLA, "tp4", ("memory.recompute=selective",)),
    ("tensorwise", TENSORWISE, "tp2-cp2", ()),
    ("tensorwise", TENSORWISE, "tp2-dp2-sp", ("memory.recompute=full",)),
    ("rowwise", T5_IN_FP8, "tp2-pp2-sp", ("memory.recompute=full", *OFFLOADED)),
    ("tensorwise", (*TENSORWISE, *T5_IN_FP8), "tp2-cp2", ("parallel.cp_method=all_gather",)),
]


@cache
def _reference(recipe, model):
    return train([f"precision.fp8={recipe}", *model, *layout_overrides("tp1")])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("recipe", "model", "layout", "options"), CASES)
def test_layout_trains_the_same_run(recipe, model, layout, options):
    overrides = [f"precision.fp8={recipe}", *model, *layout_overrides(layout), *options]
    assert_same_run(overrides, _reference(recipe, model))


def test_it_is_another_run_than_without():
    plain, _ = train(layout_overrides("tp1"), steps=2)
    for recipe in ("rowwise", "tensorwise"):
        curves, _ = _reference(recipe, () if recipe == "rowwise" else TENSORWISE)
        assert curves[0][1][0] == pytest.approx(plain[0][1][0], rel=5e-3)
        assert curves[0][1][0] != pytest.approx(plain[0][1][0], rel=1e-7)
