"""Families: each differs from the other in the parts its row names."""

from typing import get_args

import pytest
import torch
from torch import nn

from raymega.config.model import Family
from raymega.model.attention.rope import Rope
from raymega.model.families import make_block, make_norm, make_positions, make_score_head
from raymega.model.layers.mlp import GeluMlp, SwigluMlp
from raymega.model.layers.norms import Norm
from raymega.plan.layers.family_parts import FAMILY_PARTS
from raymega.plan.tensor_table import layer_tensors
from tests.support.references import plain_models
from tests.unit.model.parts import CPU, make_model_factory

PARTS = {
    "gpt2": ("layer_norm", nn.Identity, GeluMlp),
    **dict.fromkeys(("llama", "qwen2", "qwen3"), ("rms_norm", Rope, SwigluMlp)),
}


def test_every_family_of_the_schema_has_a_row():
    assert set(FAMILY_PARTS) == set(get_args(Family))


@pytest.mark.parametrize("family", PARTS)
def test_family_builds_its_parts(family):
    model = plain_models.make_model(family)
    factory = make_model_factory(model)
    positions = make_positions(model, dtype=torch.float64, device=CPU)
    block = make_block(factory, 1, model, positions)
    norm, rotation, mlp = PARTS[family]
    assert make_norm(factory, "final_norm", model).row.name == norm
    assert type(positions) is rotation and type(block.mlp) is mlp
    names = {piece.tensor.name for p in block.parameters() for piece in p.spec.pieces}
    assert names == {tensor.name for tensor in layer_tensors(model, 1)}


@pytest.mark.parametrize(("family", "norm"), [("llama", Norm), ("bert", nn.Identity)])
def test_scores_are_behind_the_final_norm_where_the_family_has_one(family, norm):
    model = plain_models.make_model(family)
    assert type(make_score_head(make_model_factory(model), model).norm) is norm
