"""What an export refuses and keeps, beside settings that config.json cannot say."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.exporter import _lost_faults, hf_export
from raymega.convert.huggingface.names import hf_tensors
from raymega.convert.native import Header, TensorSource, write_checkpoint
from raymega.convert.number_formats import recast
from raymega.convert.tuned.merge import merge
from raymega.errors import ConfigError
from raymega.plan.tensor_table import saved_tensors
from raymega.storage.registry import open_store
from tests.unit.convert.folders import NOW, make_model

GPT2 = {"architectures": ["GPT2LMHeadModel"]}


def test_weights_that_no_tensor_of_theirs_holds_are_refused():
    further = make_model("gpt2", num_nextn_predict_layers=1)
    (fault,) = _lost_faults(further, hf_tensors(further), GPT2)
    assert "GPT2LMHeadModel has no mtp.0." in str(fault)
    plain = make_model("gpt2")
    assert _lost_faults(plain, hf_tensors(plain), GPT2) == []


def test_routers_counts_are_no_weights():
    moe = {"num_experts": 4, "load_balancing_type": "global", "router_aux_loss_coef": 0.1}
    model = make_model("llama", moe=moe)
    assert _lost_faults(model, hf_tensors(model), {}) == []


def _save(uri, model, *, kinds=("model",)):
    """A run's checkpoint in bfloat16: frozen weights in that format, masters in float32."""
    numbers = np.random.default_rng(3)

    def source(kind, tensor):
        dtype = "bfloat16" if tensor.is_frozen else "float32"
        values = recast(numbers.normal(size=tensor.shape), "float64", dtype)
        name, shape = f"{kind}/{tensor.name}", tensor.shape
        return TensorSource(
            tensor=name, dtype=dtype, global_shape=shape, box=tensor.whole, read=lambda: values
        )

    found = [
        source(kind, each)
        for kind in kinds
        for each in saved_tensors(model)
        if kind == "model" or not each.is_frozen
    ]
    state = {"step": 1, "samples": 0, "tokens": 0}
    job = {"model": model.model_dump(mode="json")}
    write_checkpoint(open_store(uri), found, Header(state=state, job=job, created=NOW, grid={}))


@pytest.mark.parametrize(
    "how",
    [
        {"freeze": ("embedding.*",)},
        {"freeze": ("*",), "train": ("layers.1.*",)},
        {"neftune_noise_alpha": 5.0},
        {"mup_base_width": 8},
    ],
)
def test_how_a_model_was_trained_keeps_no_export_back(how, tmp_path):
    _save(str(tmp_path / "run"), make_model(**how))
    done = hf_export(str(tmp_path / "run"), tmp_path / "theirs")
    # the logits' factor of muP is in the last norm
    ours = open_checkpoint(str(tmp_path / "run")).read("model/final_norm.weight")
    norm = load_file(tmp_path / "theirs" / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(norm, ours / (2 if "mup_base_width" in how else 1))
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["dtype"] == done.dtype


def test_mups_factor_has_no_place_in_a_norm_that_adds_one(tmp_path):
    _save(str(tmp_path / "run"), make_model("gemma2", mup_base_width=8))
    with pytest.raises(ConfigError, match="mup_base_width=8"):
        hf_export(str(tmp_path / "run"), tmp_path / "theirs")


def test_frozen_weights_round_no_others(tmp_path):
    model, run = make_model(freeze=("embedding.*",)), str(tmp_path / "run")
    _save(run, model, kinds=("model", "ema"))
    assert hf_export(run, tmp_path / "theirs").dtype == "float32"
    average = merge([run], str(tmp_path / "ema"), created=NOW, is_average=True)
    mean = merge([run, run], str(tmp_path / "mean"), created=NOW)
    assert (average.dtype, mean.dtype) == ("float32", "float32")
    found, wanted = (
        open_checkpoint(uri).read(f"{kind}/final_norm.weight")
        for uri, kind in ((average.uri, "model"), (run, "ema"))
    )
    np.testing.assert_array_equal(found, wanted)
