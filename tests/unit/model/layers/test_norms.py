"""Norms: their definition in float64, statistics better than the dtype in bfloat16."""

import pytest
import torch

from raymega.model.layers.norms import HeadNorms, Norm
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
