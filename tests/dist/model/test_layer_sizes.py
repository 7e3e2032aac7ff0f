"""OpenELM, whose layers differ in heads and widths, against layers of transformers with these sizes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.importer import hf_import
from raymega.errors import RaymegaError
from raymega.plan.grid import Grid
from tests.dist.model.test_hugging_face import LAYOUTS, NOW, _logits, _tokens, _whole
from tests.support.ranks import run_grid
from tests.support.references import hf_models, plain_models
from tests.support.references.plain_training import (
    LOGITS_LIMIT,
    TRAINING_LIMIT,
    train_plainly,
    train_rank,
    training_plan,
    whole_weights,
)

pytestmark = pytest.mark.dist

HEADS, KV_HEADS, WIDTHS = (8, 4, 8, 4), (4, 4, 2, 2), (24, 96, 48, 72)
CONFIG = {
    "model_type": "openelm", "architectures": ["OpenELMForCausalLM"], "model_dim": 48, "vocab_size": 259,
    "num_transformer_layers": 4, "head_dim": 12, "num_query_heads": HEADS, "num_kv_heads": KV_HEADS,
    "ffn_multipliers": [width / 48 for width in WIDTHS], "ffn_dim_divisor": 24, "rope_max_length": 40,
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm",
    "self_attn.o_proj": "attn.out_proj", "post_attention_layernorm": "ffn_norm", "mlp.down_proj": "ffn.proj_2",
}  # fmt: skip
STACKS = {
    "attn.qkv_proj": [f"self_attn.{part}_proj" for part in "qkv"],
    "ffn.proj_1": ["mlp.gate_proj", "mlp.up_proj"],
}


def _make_model():
    """Qwen3 of transformers, each of its layers made with sizes of its own."""
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3Config,
        Qwen3DecoderLayer,
        Qwen3ForCausalLM,
    )

    fields = {
        "hidden_size": 48, "num_hidden_layers": 4, "head_dim": 12, "vocab_size": 259, "max_position_embeddings": 40,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    }  # fmt: skip

    def config(layer):
        return Qwen3Config(
            **fields, num_attention_heads=HEADS[layer], num_key_value_heads=KV_HEADS[layer],
            intermediate_size=WIDTHS[layer], attn_implementation="eager",
        )  # fmt: skip

    model = Qwen3ForCausalLM(config(0))
    for layer in range(4):
        model.model.layers[layer] = Qwen3DecoderLayer(config(layer), layer)
    model = model.double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for values in model.parameters():
            noise = 0.2 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
            values.copy_(noise + (values.ndim == 1))
    return model


def _their_weights(model):
    """The weights by OpenELM's names."""
    mine = model.state_dict()
    found = {
        "transformer.token_embeddings.weight": mine["model.embed_tokens.weight"],
        "transformer.norm.weight": mine["model.norm.weight"],
    }
    for layer in range(4):
        at, own = f"model.layers.{layer}", f"transformer.layers.{layer}"
        for name, theirs in NAMES.items():
            found[f"{own}.{theirs}.weight"] = mine[f"{at}.{name}.weight"]
        for theirs, parts in STACKS.items():
            found[f"{own}.{theirs}.weight"] = torch.cat([mine[f"{at}.{p}.weight"] for p in parts])
    return {name: values.clone().contiguous() for name, values in found.items()}


@pytest.fixture
def theirs():
    return _make_model()


def _import(tmp_path, model):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_their_weights(model), folder / "model.safetensors")
    return hf_import(folder, str(tmp_path / "ours"), created=NOW, make_vocab_size_divisible_by=8)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_layers_with_these_sizes(tmp_path, theirs, layout):
    done, (tp, cp, pp) = _import(tmp_path, theirs), LAYOUTS[layout]
    assert done.model.layer_sizes.num_heads == (8, 4)
    ours = _whole(run_grid(_logits, Grid(tp=tp, cp=cp), done.model, done.uri, pp), done.model)
    with torch.no_grad():
        wanted = hf_models.logits(theirs, _tokens())
    assert plain_models.difference(ours, wanted) < LOGITS_LIMIT


def test_way_back_is_bit_exact(tmp_path, theirs):
    done = _import(tmp_path, theirs)
    hf_export(done.uri, tmp_path / "back")
    wanted, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert wanted.keys() == back.keys()
    assert all(torch.equal(back[name], values) for name, values in wanted.items())
    hf_import(tmp_path / "back", str(tmp_path / "again"), created=NOW)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["num_query_heads"] == list(HEADS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp1", "tp2-pp2-cp2", "dp2-zero3"])
def test_steps_are_those_of_a_plain_loop(tmp_path, theirs, layout):
    done = _import(tmp_path, theirs)
    options = [f"checkpoint.init_from={done.uri}"]
    sizes = layout.removesuffix("-zero3")
    more = ["parallel.sharding=parameters"] if sizes != layout else []
    plan = training_plan(done.model, sizes, *options, *more)
    results = run_grid(train_rank, plan.grid, plan.to_json())
    curve = train_plainly(theirs, theirs, training_plan(done.model, "tp1", *options))
    for ours, _ in results:
        for mine, wanted in zip(ours, curve, strict=True):
            assert mine == pytest.approx(wanted, rel=TRAINING_LIMIT)
    whole, wanted = whole_weights(results), theirs.state_dict()
    for layer in range(4):
        for name, part in {"self_attn.q_proj": "attention.q", "mlp.down_proj": "mlp.down"}.items():
            ours = torch.from_numpy(whole[f"layers.{layer}.{part}.weight"])
            at = wanted[f"model.layers.{layer}.{name}.weight"]
            assert plain_models.difference(ours, at) < TRAINING_LIMIT, (layer, name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["parallel.tp=8"], "layer 1"),
        (["parallel.cp=4", "parallel.cp_method=all_to_all", "parallel.tp=2"], "whole heads"),
        (["model.num_heads=16"], "the largest of its layers', 8"),
        (["model.layer_sizes.ffn_hidden_size=[8,8,8,8,8]", "model.ffn_hidden_size=8"], "has 5 sizes"),
        (["model.head_dim='hidden_size / num_heads'"], "heads of one width"),
    ],
)  # fmt: skip
def test_layouts_that_cut_no_layer_evenly_are_refused(options, words):
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "ffn_hidden_size": WIDTHS}
    model = plain_models.make_model(
        "qwen3", num_layers=4, hidden_size=48, num_heads=8, num_kv_heads=4, head_dim=12, ffn_hidden_size=96,
        layer_sizes=sizes, max_positions=64,
    )  # fmt: skip
    with pytest.raises(RaymegaError, match=words):
        training_plan(model, "tp1", *options)
