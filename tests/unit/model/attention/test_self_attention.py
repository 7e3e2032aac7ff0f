"""Attention on one rank: the written-out softmax, causality, grouped queries."""

from dataclasses import replace
from math import log1p
from types import SimpleNamespace

import pytest
import torch

from raymega.model.attention.self_attention import Attention
from raymega.model.families import make_positions
from raymega.parallel.context_parallel.context import make_token_layout, no_context, whole_rows
from raymega.plan.layers.layer_pattern import layer_parts
from tests.support.references import plain_models
from tests.support.tolerances import FLOAT64_LAYER
from tests.unit.model.parts import CPU, make_model_factory

AT = "layers.0.attention"


def _attention(model):
    factory = make_model_factory(model)
    positions = make_positions(model, dtype=torch.float64, device=CPU)
    attention = Attention(factory, AT, model, positions, layer_parts(model, 0))
    weights = plain_models.draw_weights(factory.table.values())
    plain_models.fill(attention.parameters(), weights)
    return attention, weights


@pytest.mark.parametrize("kv_heads", [8, 4, 1], ids=["as-many", "grouped", "one"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_attention_is_the_written_out_softmax(family, kv_heads):
    model = plain_models.make_model(family, num_kv_heads=kv_heads)
    attention, weights = _attention(model)
    x = torch.randn(7, 3, model.hidden_size).double().requires_grad_()
    y, grad_y = attention(x), torch.randn(7, 3, model.hidden_size).double()
    wanted = plain_models.attention(model, weights, AT, x.transpose(0, 1)).transpose(0, 1)
    assert plain_models.difference(y, wanted) < FLOAT64_LAYER
    (grad,) = torch.autograd.grad(y, x, grad_y)
    (grad_wanted,) = torch.autograd.grad(wanted, x, grad_y)
    assert plain_models.difference(grad, grad_wanted) < FLOAT64_LAYER


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_earlier_positions_do_not_see_later_ones(family):
    model = plain_models.make_model(family)
    attention, _ = _attention(model)
    x = torch.randn(7, 1, model.hidden_size).double()
    changed = x.clone()
    changed[4] += 1.0
    before, after = attention(x), attention(changed)
    assert torch.equal(before[:4], after[:4])
    assert not torch.isclose(before[4:], after[4:]).all(-1).any()


def test_norms_without_weights_follow_rope_by_halves_too():
    model = plain_models.make_model("llama")
    factory, parts = make_model_factory(model), layer_parts(model, 0)
    positions = make_positions(model, dtype=torch.float64, device=CPU)
    family = replace(parts.family, qk_norm="l2")
    attention = Attention(factory, AT, model, positions, replace(parts, family=family))
    plain_models.fill(attention.parameters(), plain_models.draw_weights(factory.table.values()))
    qkv = attention.qkv(torch.randn(7, 1, model.hidden_size).double())
    queries, keys, _ = attention._heads(qkv, make_token_layout(whole_rows(7, CPU), no_context()))
    for heads in (queries, keys):
        squares = heads.square().mean(-1)
        assert torch.allclose(squares, torch.ones_like(squares), rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_temperatures_grow_with_the_logarithm_of_the_position_and_are_rounded_once(dtype):
    """As in Llama 4: 1 + scale * log(1 + floor((position + 1) / floor))."""
    attention = SimpleNamespace(temperature=(8, 0.1))
    positions = torch.tensor([[0], [6], [7], [8], [100], [10_000]])
    layout, q = SimpleNamespace(positions=positions), torch.empty(0, dtype=dtype)
    found = Attention._temperatures(attention, layout, q)
    steps = [0, 0, 1, 1, 12, 1250]
    wanted = torch.tensor([1 + 0.1 * log1p(step) for step in steps], dtype=torch.float64)
    assert found.shape == (6, 1, 1, 1)
    assert found.dtype == dtype
    near = {torch.float64: 1e-15, torch.bfloat16: 1e-6}[dtype]
    assert (found.flatten().double() - wanted.to(dtype).double()).abs().max() <= near
