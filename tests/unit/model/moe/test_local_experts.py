"""One node of autograd computes what dispatch, experts and their weighing do one after the other."""

from types import SimpleNamespace

import pytest
import torch

from raymega.config.moe import MoeSection
from raymega.model.layers.mlp import gelu_tanh
from raymega.model.moe import grouped_swiglu
from raymega.model.moe import layer as layers
from raymega.model.moe.experts import Experts
from raymega.model.moe.local_experts import is_one_node
from raymega.parallel.comm.process_groups import alone
from raymega.parallel.core.weight_grads import run_deferred
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups
from tests.support.references.moe import Factory, draw_weights
from tests.support.references.moe import layer as loop_over_experts
from tests.unit.model.parts import make_stream

D, F, B = 12, 8, 2
MOE = MoeSection(num_experts=6, top_k=2, router_aux_loss_coef=0.0)
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}


def _draw(num_tokens, moe, *, chosen=None):
    """Weights and tokens; with ``chosen`` no token goes to another expert than these."""
    weights = draw_weights(moe, width=D, ffn_hidden_size=F)
    generator = torch.Generator().manual_seed(num_tokens)
    x, grad = torch.randn(2, num_tokens, B, D, generator=generator).double()
    if chosen is not None:
        x[..., 0] = 5.0
        others = [each for each in range(moe.num_experts) if each not in chosen]
        weights["router.weight"][:, 0] = 0.0
        weights["router.weight"][others, 0] = -10.0
    return weights, x, grad


def _work(weights, x, grad, *, moe, dtype, is_put_off=False, is_remade=False):
    """Output and gradients by name."""
    nobody, sp = alone(0), make_stream()
    factory = Factory(weights, sp, dtype=dtype)
    groups = ExpertGroups(ep=nobody, etp=nobody, micro=nobody, sp=sp)
    layer = layers.MoeLayer(factory, "moe", moe, groups)
    layer.is_remade = is_remade
    leaf = x.to(dtype, copy=True).requires_grad_()
    y = layer(leaf)
    if is_put_off:
        with factory.grad_queue.collecting() as owed:
            y.backward(grad.to(dtype))
        assert {id(debt.param) for debt in owed} >= {id(p) for p in layer.experts.parameters()}
        run_deferred(owed)
    else:
        y.backward(grad.to(dtype))
    gradients = {name: values for name, _, values in factory.gradients(layer)}
    return {"y": y.detach(), "x": leaf.grad, **gradients}


def _apart(found, wanted):
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        scale = values.double().abs().max().clamp(min=1.0)
        yield name, ((found[name].double() - values.double()).abs().max() / scale).item()


CASES = {
    "many": (16, None, MOE),
    "one-token": (1, None, MOE),
    "two-experts-take-all": (16, (1, 4), MOE),
    "all-chosen": (5, None, MOE.model_copy(update={"top_k": 6})),
    "sigmoid": (
        7,
        None,
        MOE.model_copy(update={"router_score_function": "sigmoid", "routed_scaling_factor": 2.5}),
    ),
}


@pytest.mark.parametrize(("ep", "etp", "is_one"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_experts_that_other_ranks_have_a_part_of_are_no_one_node(ep, etp, is_one):
    groups = SimpleNamespace(ep=SimpleNamespace(size=ep), etp=SimpleNamespace(size=etp))
    experts = SimpleNamespace(can_be_one_node=True)
    for is_dropping in (False, True):
        routing = SimpleNamespace(is_dropping=is_dropping)
        assert is_one_node(experts, routing, groups) == (is_one and not is_dropping)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_one_node_equals_the_nodes_it_stands_for(case, dtype, monkeypatch):
    num_tokens, chosen, moe = CASES[case]
    drawn = _draw(num_tokens, moe, chosen=chosen)
    found, put_off = (
        _work(*drawn, moe=moe, dtype=dtype, is_put_off=is_put_off) for is_put_off in (False, True)
    )
    for name, deviation in _apart(put_off, found):
        assert deviation == 0.0, name
    monkeypatch.setattr(layers, "is_one_node", lambda *_: False)
    for is_remade in (False, True):  # one node from rows to rows, and a node for each product
        wanted = _work(*drawn, moe=moe, dtype=dtype, is_remade=is_remade)
        for name, deviation in _apart(wanted, found):
            assert deviation <= LIMITS[dtype], name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_expert_by_expert_is_what_all_at_once_is(case, is_whole, dtype, monkeypatch):
    num_tokens, chosen, moe = CASES[case]
    drawn = _draw(num_tokens, moe, chosen=chosen)
    if not is_whole:
        monkeypatch.setattr(layers, "is_one_node", lambda *_: False)
    wanted = _work(*drawn, moe=moe, dtype=dtype)
    for limit in ("CACHED_BYTES", "PART_BYTES"):
        monkeypatch.setattr(grouped_swiglu, limit, 0)
    for is_put_off in (False, True):
        found = _work(*drawn, moe=moe, dtype=dtype, is_put_off=is_put_off)
        for name, deviation in _apart(found, wanted):
            assert deviation <= LIMITS[dtype], name


@pytest.mark.parametrize("case", CASES)
def test_one_node_equals_a_loop_over_experts(case):
    num_tokens, chosen, moe = CASES[case]
    weights, x, grad = _draw(num_tokens, moe, chosen=chosen)
    found = _work(weights, x, grad, moe=moe, dtype=torch.float64)
    leaves = {name: values.clone().requires_grad_() for name, values in weights.items()}
    leaf = x.clone().requires_grad_()
    mask = torch.ones(num_tokens, B, dtype=torch.bool)
    y, _, details = loop_over_experts(moe, leaves, leaf, mask)
    y.backward(grad)
    if chosen is not None:
        assert {each for token in details.chosen for each in token} == set(chosen)
    wanted = {name: leaves[name].grad for name in found if name in leaves}
    for name, deviation in _apart(found, {"y": y.detach(), "x": leaf.grad, **wanted}):
        assert deviation <= LIMITS[torch.float64], name


@pytest.mark.parametrize("is_remade", [False, True])
def test_nonlinearity_of_experts_is_recomputed_only_where_it_is_asked_for(is_remade, monkeypatch):
    """Both ways give the same numbers: only memory and time tell them apart."""
    calls = []

    def counted(function, x):
        calls.append(function)
        return function(x)

    monkeypatch.setattr("raymega.model.moe.experts.checkpoint_output", counted)
    experts = Experts.__new__(Experts)
    torch.nn.Module.__init__(experts)
    experts.grad_queue, experts.up_place, experts.down_place = None, None, None
    experts.up_bias, experts.down_bias = None, None
    experts.inside, experts.is_remade = gelu_tanh, is_remade
    experts.up_adapters, experts.down_adapter, experts.adapter_rank = torch.nn.ModuleDict(), None, 0
    experts.up = torch.nn.Parameter(torch.randn(2, 4, 3))
    experts.down = torch.nn.Parameter(torch.randn(2, 3, 4))
    experts(torch.randn(5, 3), torch.tensor([2, 3]))
    assert calls == ([gelu_tanh] if is_remade else [])
