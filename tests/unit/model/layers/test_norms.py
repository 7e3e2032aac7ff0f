"""Norms: their definition in float64, statistics better than the dtype in bfloat16."""

import pytest
import torch

from raymega.model.layers.norms import HeadNorms, Norm, apply_offset_rms_norm
from tests.support.references import plain_models
from tests.support.tolerances import BFLOAT16_ROUNDING, FLOAT64_LAYER
from tests.unit.model.parts import make_model_factory

NORMS = {"gpt2": "layer_norm", "llama": "rms_norm"}


def _norm_and_reference(family, x, *, dtype=torch.float64):
    model = plain_models.make_model(family)
    factory = make_model_factory(model, dtype=dtype)
    norm = Norm(factory, "final_norm", NORMS[family], model.norm_eps)
    weights = plain_models.draw_weights(factory.table.values())
    weights = {name: values.to(dtype).double() for name, values in weights.items()}
    plain_models.fill(norm.parameters(), weights)
    return norm(x.to(dtype)), plain_models.norm(model, weights, "final_norm", x.to(dtype).double())


@pytest.mark.parametrize("family", NORMS)
def test_norm_is_its_definition(family):
    y, wanted = _norm_and_reference(family, torch.randn(5, 2, 48).double())
    assert plain_models.difference(y, wanted) < FLOAT64_LAYER


@pytest.mark.parametrize("family", NORMS)
def test_norm_statistics_are_wider_than_bfloat16(family):
    """A sum of 48 squares in bfloat16 would be off by many roundings; only the result is rounded."""
    x = torch.randn(5, 2, 48, generator=torch.Generator().manual_seed(0)).double() + 20
    y, wanted = _norm_and_reference(family, x, dtype=torch.bfloat16)
    assert y.dtype == torch.bfloat16
    assert plain_models.difference(y, wanted) < BFLOAT16_ROUNDING


def test_a_weight_near_0_is_added_to_1_in_float32():
    """In bfloat16 1 + 0.3004 is 1.297: all features would be 0.3% too small, as each has that factor."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.full((256,), 0.3004, dtype=torch.bfloat16, requires_grad=True)
    y = apply_offset_rms_norm(x, weight, eps=1e-6)
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(y, (normal * (1 + weight.float())).to(torch.bfloat16))
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(weight.grad.float(), normal.sum(0), rtol=2**-8, atol=0.1)


def test_query_and_key_heads_have_weights_of_their_own():
    model = plain_models.make_model("qwen3")
    factory = make_model_factory(model)
    norm = HeadNorms(factory, "layers.0.attention", model.norm_eps)
    weights = plain_models.draw_weights(factory.table.values())
    plain_models.fill(norm.parameters(), weights)
    x = torch.randn(5, 2, 12, model.head_width).double()
    y = norm(x, num_heads=8)
    for heads, name in ((slice(0, 8), "q_norm"), (slice(8, 12), "k_norm")):
        wanted = plain_models.norm(model, weights, f"layers.0.attention.{name}", x[:, :, heads])
        assert plain_models.difference(y[:, :, heads], wanted) < FLOAT64_LAYER
