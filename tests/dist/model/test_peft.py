"""Hugging Face's PEFT as the outside witness of LoRA: training steps, files both ways, merged weights."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.tuned.merge import merge
from raymega.convert.tuned.peft_export import peft_export
from raymega.convert.tuned.peft_import import peft_import
from raymega.convert.tuned.peft_names import linear_modules
from raymega.errors import CheckpointError, ConfigError
from raymega.plan.adapters import adapter_names
from tests.support.ranks import run_grid
from tests.support.references import hf_models, plain_models
from tests.support.references.peft_models import adapted
from tests.support.references.plain_training import (
    LOGITS_LIMIT,
    TRAINING_LIMIT,
    train_plainly,
    train_rank,
    training_plan,
    whole_weights,
)
from tests.unit.convert.folders import NOW

pytestmark = pytest.mark.dist


STEP_CASES = [
    ("llama3", "tp1", ()),
    ("llama3", "tp2-pp2-sp", ()),
    ("llama3", "cp2", ("memory.recompute=full",)),
    ("llama3", "dp3", ("parallel.sharding=parameters", "data.loss_on=assistant")),
    ("qwen3", "tp2-dp2-sp", ("parallel.sharding=gradients",)),
    ("qwen2_moe", "dp2-ep2", ("parallel.sharding=optimizer",)),
    ("deepseek_v3", "tp2-pp2", ()),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "layout", "options"), STEP_CASES)
def test_steps_are_those_of_peft_and_a_plain_loop(tmp_path, kind, layout, options):
    model, done = adapted(kind, tmp_path)
    start = f"checkpoint.init_from={done.base}", f"checkpoint.init_adapter={done.uri}"
    plan = training_plan(done.model, layout, *start, *options)
    results = run_grid(train_rank, plan.grid, plan.to_json())
    alone = training_plan(done.model, "tp1", *start, *(o for o in options if "loss_on" in o))
    curve = train_plainly(model, model.base_model.model, alone)
    for ours, _ in results:
        np.testing.assert_allclose(ours, curve, rtol=TRAINING_LIMIT)
    whole = whole_weights(results)
    params = dict(model.named_parameters())
    for theirs, linear in linear_modules(done.model).items():
        for end, name in zip("AB", adapter_names(linear), strict=True):
            param = params.get(f"base_model.model.{theirs}.lora_{end}.default.weight")
            assert (param is None) is (name not in whole), name
            if param is not None:
                ours = torch.from_numpy(whole[name])
                assert plain_models.difference(ours, param.detach()) < TRAINING_LIMIT, name


@pytest.mark.parametrize("kind", ["llama3", "deepseek_v3"])
def test_files_go_both_ways_and_merged_logits_are_the_same(tmp_path, kind):
    from peft import PeftModel

    model, done = adapted(kind, tmp_path)
    # bit for bit through raymega, and PEFT loads what raymega wrote
    peft_export(done.uri, tmp_path / "back")
    wanted = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    found = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name
    tokens = torch.randint(0, 259, (3, 40), generator=torch.Generator().manual_seed(5))
    again = PeftModel.from_pretrained(
        hf_models.load_model(tmp_path / "theirs"), tmp_path / "back", autocast_adapter_dtype=False
    )
    with torch.no_grad():
        unmerged = hf_models.logits(model.base_model.model, tokens)
        assert (
            plain_models.difference(
                hf_models.logits(again.eval().base_model.model, tokens), unmerged
            )
            == 0
        )
    # merged here, exported, and read by transformers
    merge([done.uri], str(tmp_path / "merged"), created=NOW)
    hf_export(str(tmp_path / "merged"), tmp_path / "merged-hf")
    merged = hf_models.load_model(tmp_path / "merged-hf")
    with torch.no_grad():
        assert plain_models.difference(hf_models.logits(merged, tokens), unmerged) < LOGITS_LIMIT


def test_an_adapter_alone_is_no_model_and_others_are_refused(tmp_path):
    _, done = adapted("llama3", tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint merge"):
        hf_export(done.uri, tmp_path / "alone")
    with pytest.raises(ConfigError, match="mean of factors"):
        merge([done.uri, done.base], str(tmp_path / "mean"), created=NOW)
    config = tmp_path / "peft" / "adapter_config.json"
    told = json.loads(config.read_text())
    config.write_text(json.dumps(told | {"use_dora": True, "rank_pattern": {"q_proj": 2}}))
    with pytest.raises(ConfigError, match="use_dora=True") as refused:
        peft_import(tmp_path / "peft", done.base, str(tmp_path / "other"), created=NOW)
    assert len(refused.value.faults) == 2
    assert not list((tmp_path / "other").glob("**/manifest*"))


def test_a_mean_of_checkpoints_is_that_of_their_weights(tmp_path):
    _, done = adapted("llama3", tmp_path)
    merge([done.uri], str(tmp_path / "merged"), created=NOW)
    uris = [done.base, str(tmp_path / "merged")]
    merge(uris, str(tmp_path / "mean"), created=NOW, weights=[3.0, 1.0])
    one, other, mean = (
        open_checkpoint(uri).read("model/layers.1.attention.q.weight")
        for uri in (*uris, str(tmp_path / "mean"))
    )
    assert np.abs(one - other).max() > 0.1
    np.testing.assert_allclose(mean, 0.75 * one + 0.25 * other, atol=1e-15)
