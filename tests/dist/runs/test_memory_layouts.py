"""Dropout and recompute: every layout drops the same elements and trains the same run."""

from functools import cache

import numpy as np
import pytest

from tests.support.jobs import layout_overrides
from tests.support.training import assert_same_run, train

pytestmark = pytest.mark.dist

DROPOUT = ["model.hidden_dropout=0.2", "model.attention_dropout=0.1"]
GPT2 = ["model.family=gpt2", "model.num_kv_heads=num_heads", "model.tie_word_embeddings=false"]
MODELS = {
    "llama": DROPOUT,
    "gpt2": [*GPT2, *DROPOUT],
    "llama-plain": [],
    "gpt2-plain": GPT2,
    "qwen3": ["model.family=qwen3", *DROPOUT],
}
PARTS = "memory.recompute_parts=[attention,activation,norm]"
RECOMPUTE = {
    "none": [],
    "selective": ["memory.recompute=selective", PARTS],
    "full": ["memory.recompute=full"],
    "full3": ["memory.recompute=full", "memory.recompute_every=3"],
}


@cache
def _reference(model):
    return train([*MODELS[model], *layout_overrides("tp1")])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "layout", "recompute"),
    [
        ("llama", "tp2", "none"),
        ("llama", "tp2-sp", "none"),
        ("gpt2", "tp4-sp", "none"),
        ("llama", "pp2", "none"),
        ("llama", "dp3", "none"),
        ("gpt2", "tp2-pp2-dp2-sp", "none"),
        ("qwen3", "tp2-sp", "selective"),
        ("llama", "tp2-pp2-dp2-sp", "selective"),
        ("gpt2", "tp2-pp2", "selective"),
        ("gpt2", "tp2-dp2-sp", "full"),
        ("llama", "tp2-pp2-sp", "full3"),
        ("llama-plain", "tp2-pp2-sp", "selective"),
        ("gpt2-plain", "tp2-sp", "full"),
    ],
)
def test_layout_trains_the_same_run(model, layout, recompute):
    assert_same_run(
        [*MODELS[model], *layout_overrides(layout), *RECOMPUTE[recompute]], _reference(model)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 4, 16])
def test_size_of_micro_batches_does_not_matter(size):
    changes = [*DROPOUT, *layout_overrides("tp1"), f"schedule.micro_batch_size={size}"]
    assert_same_run(changes, _reference("llama"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", ["attention", "activation", "norm"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "llama-plain", "gpt2-plain", "qwen3"])
def test_recompute_of_a_part_changes_no_bit_on_one_rank(model, part):
    changes = ["memory.recompute=selective", f"memory.recompute_parts=[{part}]"]
    _assert_equal([*MODELS[model], *layout_overrides("tp1"), *changes], _reference(model))


@pytest.mark.sample(2)
@pytest.mark.parametrize("recompute", ["selective", "full", "full3"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "llama-plain", "gpt2-plain"])
def test_recompute_changes_no_bit_on_one_rank(model, recompute):
    changes = [*MODELS[model], *layout_overrides("tp1"), *RECOMPUTE[recompute]]
    _assert_equal(changes, _reference(model))


def test_dropout_changes_the_run_and_steps_differ():
    plain, dropped = _reference("llama-plain")[0][0], _reference("llama")[0][0]
    assert all(abs(a[0] - b[0]) > 1e-6 for a, b in zip(plain, dropped, strict=True))


def _assert_equal(overrides, wanted):
    curves, whole = train(overrides)
    assert curves == wanted[0]
    for name, values in wanted[1].items():
        assert np.array_equal(whole[name], values), name
