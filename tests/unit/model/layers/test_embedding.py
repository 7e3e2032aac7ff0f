"""Embedding on one rank: rows of the table, positions by family, layout [S, B, D]."""

import pytest
import torch

from raymega.model.layers.embedding import Embedding
from tests.support.references import plain_models
from tests.unit.model.parts import make_model_factory


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_embedding_looks_up_tokens_and_positions(family):
    model = plain_models.make_model(family)
    factory = make_model_factory(model)
    embedding = Embedding(factory)
    tokens, _, _ = plain_models.draw_batch(model)
    x = embedding(tokens)
    assert x.shape == (7, 3, model.hidden_size) and x.is_contiguous()
    for sample, position in [(0, 0), (2, 1), (1, 6)]:
        wanted = embedding.tokens.weight[tokens[sample, position]]
        if family == "gpt2":
            wanted = wanted + embedding.positions[position]
        assert torch.equal(x[position, sample], wanted)


def test_llama_has_no_position_table():
    embedding = Embedding(make_model_factory(plain_models.make_model("llama")))
    assert [p.spec.name for p in embedding.parameters()] == ["embedding.tokens.weight"]
