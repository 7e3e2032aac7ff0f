"""Hugging Face's PEFT as the outside witness of LoRA: training steps, files both ways, merged weights."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.tuned.merge import merge
from raymega.convert.tuned.peft_export import peft_export
from raymega.convert.tuned.peft_import import peft_import
from raymega.convert.tuned.peft_names import linear_modules
from raymega.errors import CheckpointError, ConfigError
from raymega.parallel.tensor_parallel.adapters import (
    Adapter,
    AdapterSettings,
    BaseLayer,
    LinearPlace,
)
from raymega.plan.adapters import adapter_names, magnitude_name
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


WEIGHTS_IN_FLOAT32 = 1e-6
DORA = "model.lora.use_dora=true"
STEP_CASES = [
    ("llama3", "tp1", ()),
    ("llama3", "tp1", (DORA,)),
    ("llama3", "tp2-pp2-sp", ()),
    ("llama3", "tp2-pp2-sp", (DORA,)),
    ("llama3", "cp2", (DORA, "memory.recompute=full")),
    ("llama3", "dp3", (DORA, "parallel.sharding=parameters")),
    ("qwen3", "tp4", (DORA, "parallel.sharding=gradients")),
    ("qwen2_moe", "dp2-ep2", (DORA, "parallel.sharding=optimizer")),
    ("deepseek_v3", "tp2-pp2-sp", (DORA, "schedule.name=zb_h1")),
    ("llama3", "cp2", ("memory.recompute=full",)),
    ("llama3", "dp3", ("parallel.sharding=parameters", "data.loss_on=assistant")),
    ("qwen3", "tp2-dp2-sp", ("parallel.sharding=gradients",)),
    ("qwen2_moe", "dp2-ep2", ("parallel.sharding=optimizer",)),
    ("deepseek_v3", "tp2-pp2", ()),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "layout", "options"), STEP_CASES)
def test_steps_are_those_of_peft_and_a_plain_loop(tmp_path, kind, layout, options):
    model, done = adapted(kind, tmp_path, use_dora=DORA in options)
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
        ends = {"A": adapter_names(linear)[0], "B": adapter_names(linear)[1]}
        ends["magnitude_vector"] = magnitude_name(linear)
        for end, name in ends.items():
            param = params.get(f"base_model.model.{theirs}.lora_{end}.default.weight")
            assert (param is None) is (name not in whole), name
            if param is not None:
                ours = torch.from_numpy(whole[name])
                assert plain_models.difference(ours, param.detach()) < TRAINING_LIMIT, name


@pytest.mark.parametrize(
    ("kind", "use_dora"), [("llama3", False), ("deepseek_v3", False), ("llama3", True)]
)
def test_files_go_both_ways_and_merged_logits_are_the_same(tmp_path, kind, use_dora):
    from peft import PeftModel

    model, done = adapted(kind, tmp_path, use_dora=use_dora)
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
    config.write_text(json.dumps(told | {"bias": "all", "rank_pattern": {"q_proj": 2}}))
    with pytest.raises(ConfigError, match="bias=all") as refused:
        peft_import(tmp_path / "peft", done.base, str(tmp_path / "other"), created=NOW)
    assert len(refused.value.faults) == 2
    assert not list((tmp_path / "other").glob("**/manifest*"))


@pytest.mark.parametrize("kind", ["cat", "linear"])
def test_a_combined_adapter_is_that_of_peft(tmp_path, kind):
    # of rsLoRA, PEFT scales what it has combined once more
    model, done = adapted("qwen3", tmp_path)
    # a second adapter of other values
    network = model.base_model.model
    model.add_adapter("second", model.peft_config["default"])
    generator = torch.Generator().manual_seed(4)
    for name, param in model.named_parameters():
        if ".second." in name:
            param.data = 0.2 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
    model.save_pretrained(tmp_path / "both", selected_adapters=["second"])
    second = peft_import(
        tmp_path / "both" / "second", done.base, str(tmp_path / "second"), created=NOW
    )
    # PEFT's combination of both, against ours merged into the base and read by transformers
    model.add_weighted_adapter(["default", "second"], [0.7, -0.4], "both", combination_type=kind)
    model.set_adapter("both")
    ours = merge(
        [done.uri, second.uri], str(tmp_path / "ours"), created=NOW, weights=[0.7, -0.4],
        combination_type=kind,
    )  # fmt: skip
    merge([ours.uri], str(tmp_path / "merged"), created=NOW)
    hf_export(str(tmp_path / "merged"), tmp_path / "merged-hf")
    tokens = torch.randint(0, 259, (3, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs = hf_models.logits(network, tokens)
        found = hf_models.logits(hf_models.load_model(tmp_path / "merged-hf"), tokens)
    # PEFT rounds the roots of the weights to float32
    limit = LOGITS_LIMIT if kind == "cat" else WEIGHTS_IN_FLOAT32
    assert plain_models.difference(found, theirs) < limit


def test_dora_drops_the_input_of_the_base_too():
    from peft.tuners.lora.dora import DoraLinearLayer

    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.nn.Parameter(values)

    w, bias, a, b, magnitude, x = (
        drawn(6, 5), drawn(6), drawn(2, 5), drawn(6, 2), drawn(6), drawn(3, 5),
    )  # fmt: skip
    dropped = x * (drawn(3, 5) > 0)
    layer, factors = (
        torch.nn.Linear(5, 6).double(),
        [torch.nn.Linear(*n, bias=False).double() for n in ((5, 2), (2, 6))],
    )
    layer.weight, layer.bias, factors[0].weight, factors[1].weight = w, bias, a, b
    theirs = DoraLinearLayer(fan_in_fan_out=False)
    theirs.weight = magnitude
    added = theirs(dropped, lora_A=factors[0], lora_B=factors[1], scaling=1.5, base_layer=layer)
    # ours, on one rank
    place = LinearPlace(
        first=functional.linear, second=functional.linear, base=functional.linear, is_stream=True
    )
    adapter = SimpleNamespace(
        a=a, b=b, magnitude=magnitude, place=place, settings=AdapterSettings(scale=1.5),
        _dropped=lambda _x: dropped,
    )  # fmt: skip
    base = BaseLayer(weight=w.detach(), bias=bias.detach(), output=layer(x).detach())
    ours = Adapter.forward(adapter, x, base)
    torch.testing.assert_close(ours, layer(x) + added, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(ours.square().sum(), (a, b, magnitude)),
        torch.autograd.grad((layer(x).detach() + added).square().sum(), (a, b, magnitude)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


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
