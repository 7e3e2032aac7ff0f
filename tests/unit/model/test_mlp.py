"""Feed-forward layers on one rank against their formulas."""

import pytest
import torch

from raymega.model.mlp import GeluMlp, SwigluMlp
from tests.support import reference
from tests.support.tolerances import FLOAT64_LAYER
from tests.unit.model.parts import make_model_factory

AT = "layers.0.mlp"


@pytest.mark.parametrize(("family", "kind"), [("gpt2", GeluMlp), ("llama", SwigluMlp)])
def test_mlp_is_its_formula(family, kind):
    model = reference.make_model(family)
    factory = make_model_factory(model)
    mlp = kind(factory, AT)
    weights = reference.draw_weights(factory.table.values())
    reference.fill(mlp.parameters(), weights)
    x = torch.randn(5, 2, model.width).double()
    assert reference.difference(mlp(x), reference.mlp(model, weights, AT, x)) < FLOAT64_LAYER


def test_gate_and_up_are_one_parameter():
    model = reference.make_model("llama")
    mlp = SwigluMlp(make_model_factory(model), AT)
    assert [p.spec.name for p in mlp.parameters()] == [
        f"{AT}.gate.weight+{AT}.up.weight",
        f"{AT}.down.weight",
    ]
