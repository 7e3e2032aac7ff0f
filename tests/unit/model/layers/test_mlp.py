"""Feed-forward layers on one rank against their formulas."""

import pytest
import torch
from torch.nn.functional import gelu

from raymega.model.layers.mlp import GeluMlp, SwigluMlp, make_gate
from tests.support.references import plain_models
from tests.support.tolerances import FLOAT64_LAYER
from tests.unit.model.parts import make_model_factory

AT = "layers.0.mlp"


@pytest.mark.parametrize(("family", "kind"), [("gpt2", GeluMlp), ("llama", SwigluMlp)])
def test_mlp_is_its_formula(family, kind):
    model = plain_models.make_model(family)
    factory = make_model_factory(model)
    mlp = kind(factory, AT)
    weights = plain_models.draw_weights(factory.table.values())
    plain_models.fill(mlp.parameters(), weights)
    x = torch.randn(5, 2, model.hidden_size).double()
    assert plain_models.difference(mlp(x), plain_models.mlp(model, weights, AT, x)) < FLOAT64_LAYER


def test_what_is_inside_is_by_the_name_of_the_activation():
    model = plain_models.make_model("llama")
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64)
    assert make_gate("silu", model) is None
    found = make_gate("gelu_tanh", model)(torch.cat((gate, up), dim=-1))
    assert torch.equal(found, gelu(gate, approximate="tanh") * up)
    found = make_gate("clamped_silu", model)(torch.cat((3 * gate, up), dim=-1))
    kept = (3 * gate).clamp(max=7.0)
    wanted = kept * torch.sigmoid(1.702 * kept) * (up.clamp(-7.0, 7.0) + 1)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)


def test_gate_and_up_are_one_parameter():
    model = plain_models.make_model("llama")
    mlp = SwigluMlp(make_model_factory(model), AT)
    assert [p.spec.name for p in mlp.parameters()] == [
        f"{AT}.gate.weight+{AT}.up.weight",
        f"{AT}.down.weight",
    ]
