"""Embedding on one rank: rows of the table, positions by family, layout [S, B, D]."""

import pytest
import torch

from raymega.model.embedding import Embedding
from tests.support import reference
from tests.unit.model.parts import make_model_factory


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_embedding_looks_up_tokens_and_positions(family):
    model = reference.make_model(family)
    factory = make_model_factory(model)
    embedding = Embedding(factory)
    tokens, _, _ = reference.draw_batch(model)
    x = embedding(tokens)
    assert x.shape == (7, 3, model.width) and x.is_contiguous()
    for sample, position in [(0, 0), (2, 1), (1, 6)]:
        wanted = embedding.tokens.weight[tokens[sample, position]]
        if family == "gpt2":
            wanted = wanted + embedding.positions[position]
        assert torch.equal(x[position, sample], wanted)


def test_llama_has_no_position_table():
    embedding = Embedding(make_model_factory(reference.make_model("llama")))
    assert [p.spec.name for p in embedding.parameters()] == ["embedding.tokens.weight"]
