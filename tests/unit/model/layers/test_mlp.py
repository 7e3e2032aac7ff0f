"""Feed-forward layers on one rank against their formulas."""

import pytest
import torch

from raymega.model.layers.mlp import GeluMlp, SwigluMlp
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


def test_gate_and_up_are_one_parameter():
    model = plain_models.make_model("llama")
    mlp = SwigluMlp(make_model_factory(model), AT)
    assert [p.spec.name for p in mlp.parameters()] == [
        f"{AT}.gate.weight+{AT}.up.weight",
        f"{AT}.down.weight",
    ]
