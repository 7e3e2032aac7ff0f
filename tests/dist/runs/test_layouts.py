"""Whole runs: any legal layout trains the same run as one rank, to rounding in float64."""

from functools import cache

import numpy as np
import pytest

from tests.support.jobs import layout_overrides
from tests.support.training import LIMIT, assert_same_run, train

pytestmark = pytest.mark.dist

MODELS = {
    "gpt2-tied": ["model.family=gpt2", "model.num_kv_heads=num_heads"],
    "gpt2-untied": [
        "model.family=gpt2",
        "model.num_kv_heads=num_heads",
        "model.tie_word_embeddings=false",
    ],
    "llama-gqa-tied": [],
    "llama-gqa-untied": ["model.tie_word_embeddings=false"],
    "llama-kv2": ["model.num_kv_heads=2"],
    "llama-8-layers": ["model.num_layers=8"],
    "gpt2-kv1": ["model.family=gpt2", "model.num_kv_heads=1"],
    "qwen2-kv2": ["model.family=qwen2", "model.num_kv_heads=2"],
    "qwen3-kv2": ["model.family=qwen3", "model.num_kv_heads=2", "model.head_dim=6"],
    "llama-all-losses": [
        "model.num_kv_heads=2",
        "model.vocab_size=70",
        "model.label_smoothing=0.1",
        "model.z_loss=1e-3",
    ],
}
SHARDED = ["dp3", "tp2-pp2-dp2", "pp3-dp2", "pp2-dp3", "pp4-dp2", "tp4-dp2", "tp2-pp2-dp2-sp"]
CASES = [
    *(("llama-gqa-tied", layout) for layout in ("tp2", "pp2", "dp2", "tp4-pp2", "dp3")),
    *(
        (model, layout)
        for model in ("gpt2-tied", "gpt2-untied", "llama-gqa-tied", "llama-gqa-untied")
        for layout in ("tp2-pp2-dp2", "tp2-pp2-dp2-sp")
    ),
    *((model, layout) for model in ("gpt2-tied", "gpt2-untied") for layout in ("pp4-dp2", "dp3")),
    ("llama-gqa-tied", "tp2-sp"),
    ("gpt2-untied", "tp4-sp"),
    ("llama-gqa-untied", "tp4-pp2-sp"),
    ("llama-gqa-tied", "tp2-dp3-sp"),
    ("llama-kv2", "tp4"),
    ("llama-kv2", "tp4-dp2-sp"),
    pytest.param("llama-kv2", "tp8-sp", marks=pytest.mark.wide),
    *((model, layout) for model in ("qwen2-kv2", "qwen3-kv2") for layout in ("tp4-sp", "tp2-pp2")),
    ("gpt2-kv1", "tp2-pp2"),
    ("gpt2-kv1", "tp4-pp2-sp"),
    ("llama-all-losses", "tp4-dp2"),
    ("llama-all-losses", "tp4-pp2-sp"),
]


@cache
def _reference(model: str):
    return train([*MODELS[model], *layout_overrides("tp1")])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_layout_trains_the_same_run(model, layout):
    check_same_run([*MODELS[model], *layout_overrides(layout)], model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["gpt2-tied", "llama-gqa-tied", "llama-gqa-untied"])
@pytest.mark.parametrize("layout", SHARDED)
def test_sharded_optimizer_trains_the_same_run(model, layout):
    check_same_run(
        [*MODELS[model], *layout_overrides(layout), "parallel.sharding=optimizer"],
        model,
    )


def check_same_run(overrides, model):
    assert_same_run(overrides, _reference(model))


def test_batch_with_masked_tail_and_uneven_dp_is_the_same_run():
    wanted = [*layout_overrides("dp3"), "schedule.micro_batch_size=3"]
    assert_same_run(wanted, _reference("llama-gqa-tied"))


def test_padding_of_the_table_is_no_part_of_the_run():
    """Rows 70 to 127 stay zero through weight decay; without them the run is the same."""
    (curve,), whole = _reference("llama-all-losses")
    overrides = [*MODELS["llama-all-losses"], *layout_overrides("tp2-sp")]
    curves, tensors = train([*overrides, "model.make_vocab_size_divisible_by=1"])
    np.testing.assert_allclose(curves[0], curve, rtol=LIMIT)
    for name, values in whole.items():
        rows = 70 if "embedding" in name else len(values)
        assert not values[rows:].any(), f"{name}: padding is not zero"
        np.testing.assert_allclose(tensors[name], values[:rows], rtol=0, atol=LIMIT, err_msg=name)


def test_loss_falls_in_the_reference_run():
    (curve,), _ = _reference("llama-gqa-tied")
    assert curve[-1][0] < curve[0][0]
