"""config.json: both spellings of RoPE, published configs, and what is refused."""

import pytest

from raymega.convert.hf_config import config_from, model_from
from raymega.errors import ConfigError
from raymega.plan.state_size import count_parameters
from tests.unit.convert.folders import make_model

LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


def test_published_configs_give_models_of_the_published_size():
    llama, qwen = model_from(LLAMA31_8B), model_from(QWEN3_06B)
    assert (count_parameters(llama), count_parameters(qwen)) == (8_030_261_248, 596_049_920)
    assert (llama.rope_scaling, llama.rope_base, llama.rope_factor) == ("llama3", 500000.0, 8.0)
    assert (llama.max_positions, llama.rope_original_positions) == (131072, 8192)
    assert (qwen.head_width, qwen.rope_scaling, qwen.norm_eps) == (128, "none", 1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ["none", "llama3"])
def test_config_gives_back_the_model(family, rope):
    changes = {} if family == "gpt2" else {"rope_scaling": rope, "rope_base": 12345.0}
    model = make_model(family, **changes, init_std=0.03, norm_eps=2e-6, is_embedding_tied=False)
    config = config_from(model, dtype="float32", carried={"bos_token_id": 7, "torch_dtype": "x"})
    assert config["bos_token_id"] == 7 and "torch_dtype" not in config
    assert model_from(config).model_copy(update={"vocab_multiple": 8}) == model
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert model_from(old) == model_from(config)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (
            {"model_type": "bert"},
            "model_type='bert'; the architectures that can be converted",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' is built"),
        ({"attention_bias": True}, "attention_bias=True; only nothing or False is built"),
        ({"quantization_config": {}}, "quantization_config={}"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn with no factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": 0}, "gives model.num_layers=0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_networks_are_refused(change, fact):
    with pytest.raises(ConfigError) as caught:
        model_from(LLAMA31_8B | change)
    assert fact in str(caught.value)
