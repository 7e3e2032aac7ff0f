"""Dropout in a stage: every place has masks of its own, by sample; evaluation drops nothing."""

import torch

from raymega.config.schema import MemorySection
from raymega.parallel.core.dropout import keep_mask, place_key, row_keys
from tests.support.references import plain_models
from tests.unit.model.parts import make_stage_modules

MODEL = plain_models.make_model("llama", hidden_dropout=0.3, attention_dropout=0.2)
SAMPLES = torch.tensor([5, 9, -1])
BATCH = plain_models.draw_batch(MODEL)


def _stage():
    return make_stage_modules(MODEL, seed=7)[0]


def test_every_place_has_a_key_of_its_own_after_its_name():
    stage = _stage()
    token_layout = {"embedding": stage.embedding_dropout}
    for layer, block in stage.layers.items():
        token_layout[f"layers.{layer}.attention"] = block.attention_dropout
        token_layout[f"layers.{layer}.mlp"] = block.mlp_dropout
    assert {name: place.place_key for name, place in token_layout.items()} == {
        name: place_key(7, name) for name in token_layout
    }
    heads = torch.cat([block.attention.core.dropout.head_keys for block in stage.layers.values()])
    assert heads.unique().numel() == MODEL.num_layers * MODEL.num_heads
    assert heads[9] == place_key(7, "layers.1.attention.weights.1")


def test_embedding_is_dropped_by_sample_position_and_feature():
    stage = _stage()
    x = torch.ones(7, 3, MODEL.hidden_size, dtype=torch.float64)
    seen = []
    stage.embedding_dropout.register_forward_hook(lambda _m, args, _out: seen.append(args[1].own))
    stage(*BATCH, None, SAMPLES)
    kept = keep_mask(
        row_keys(7, SAMPLES, torch.arange(7)[:, None]) + place_key(7, "embedding"),
        MODEL.hidden_size,
        rate=0.3,
    )
    assert torch.equal(seen[0], row_keys(7, SAMPLES, torch.arange(7)[:, None]))
    keys = type("Keys", (), {"own": seen[0]})
    assert torch.equal(stage.embedding_dropout(x, keys) != 0, kept)


def test_samples_decide_and_evaluation_drops_nothing():
    stage = _stage()
    one, again, other = (
        stage(*BATCH, None, samples) for samples in (SAMPLES, SAMPLES, SAMPLES + 3)
    )
    assert torch.equal(one, again) and not torch.equal(one, other)
    plain = make_stage_modules(plain_models.make_model("llama"), seed=7)[0]
    assert torch.equal(stage(*BATCH, None), plain(*BATCH, None))


def test_rerun_drops_what_the_forward_dropped():
    gradients = []
    for memory in (
        MemorySection(),
        MemorySection(recompute="full", recompute_every=2),
        MemorySection(recompute="selective", recompute_parts=("attention", "activation", "norm")),
    ):
        stage = _stage()
        stage.recompute(memory)
        stage(*BATCH, None, SAMPLES).backward()
        gradients.append([param.grad for param in stage.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))
