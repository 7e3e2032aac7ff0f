"""megatron-core's own Bert and T5 models on a CPU, with the weights of transformers' models, in float64.

Two of its calls ask for a GPU and compute nothing: a buffer for scores, and the random state around dropout. Both are replaced.
"""

from contextlib import contextmanager, nullcontext
from math import sqrt
from unittest.mock import patch

import torch

SIZES = {
    "hidden_size": 48, "num_attention_heads": 8, "ffn_hidden_size": 80, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "use_cpu_initialization": True, "params_dtype": torch.float64, "masked_softmax_fusion": False,
    "bias_dropout_fusion": False, "attention_softmax_in_fp32": False,
}  # fmt: skip
HEADS, HEAD_WIDTH, VOCABULARY, LENGTH = 8, 8, 259, 64


class _NoRandomState:
    def fork(self, *_):
        return nullcontext()


def _buffer(_self, shape, dtype, _name, _mem_alloc_context=None):
    return torch.empty(shape, dtype=dtype)


@contextmanager
def on_cpu():
    """Let megatron-core run without a GPU in a process that has joined a world of one."""
    from megatron.core import parallel_state

    # its groups live in module variables, so a process makes them once
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    with (
        patch("megatron.core.utils.GlobalMemoryBuffer.get_tensor", _buffer),
        patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", _NoRandomState),
    ):
        yield


def bert(weights, num_layers):
    """Return a Bert model with ``weights`` of transformers' MegatronBertForPreTraining."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=num_layers, layernorm_epsilon=1e-12, **SIZES)
    model = BertModel(
        config, 2, bert_layer_local_spec, vocab_size=VOCABULARY, max_sequence_length=40,
        share_embeddings_and_output_weights=True,
    ).double()  # fmt: skip
    outer = {
        "embedding.word_embeddings": "bert.embeddings.word_embeddings",
        "embedding.position_embeddings": "bert.embeddings.position_embeddings",
        "embedding.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
        "encoder.final_layernorm": "bert.encoder.ln",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
        "output_layer": "cls.predictions",
        "pooler.dense": "bert.pooler.dense",
        "binary_head": "cls.seq_relationship",
    }
    found = _copied(outer, weights)
    for layer in range(num_layers):
        there, here = f"bert.encoder.layer.{layer}", f"encoder.layers.{layer}"
        found |= _copied(
            {
                f"{here}.input_layernorm": f"{there}.attention.ln",
                f"{here}.self_attention.linear_proj": f"{there}.attention.output.dense",
                f"{here}.pre_mlp_layernorm": f"{there}.ln",
                f"{here}.mlp.linear_fc1": f"{there}.intermediate.dense",
                f"{here}.mlp.linear_fc2": f"{there}.output.dense",
            },
            weights,
        )
        # theirs are three matrices, its rows are of one head after another
        for kind in ("weight", "bias"):
            parts = [weights[f"{there}.attention.self.{n}.{kind}"] for n in ("query", "key", "value")]  # fmt: skip
            found[f"{here}.self_attention.linear_qkv.{kind}"] = _by_head(*parts)
    return _loaded(model, found)


def t5(weights, num_layers):
    """Return a T5 model, without positions, with ``weights`` of transformers' T5ForConditionalGeneration 1.1.

    megatron-core adds biases of relative positions with Transformer Engine alone. It divides scores by sqrt(K), so its queries
    are that much larger.
    """
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.transformer_config import TransformerConfig

    encoder, decoder = (
        TransformerConfig(
            num_layers=count, add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=1e-6,
            gated_linear_unit=True, activation_func=_gelu, kv_channels=HEAD_WIDTH, **SIZES,
        )
        for count in num_layers
    )  # fmt: skip
    specs = (
        t5_spec.get_t5_encoder_with_local_block_spec(num_layers[0]),
        t5_spec.get_t5_decoder_with_local_block_spec(num_layers[1]),
    )
    for spec in specs:  # they leave out the norm behind each side's last block
        spec.layer_norm = t5_spec.LNImpl
    model = T5Model(
        decoder, encoder, *specs, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=False,
    ).double()  # fmt: skip
    found = _copied(
        {
            "embedding.word_embeddings": "shared",
            "encoder.final_layernorm": "encoder.final_layer_norm",
            "decoder.final_layernorm": "decoder.final_layer_norm",
            "lm_head.output_layer": "lm_head",
        },
        weights,
    )
    found["embedding.position_embeddings.weight"] = torch.zeros(LENGTH, 48, dtype=torch.float64)
    for side, count in zip(("encoder", "decoder"), num_layers, strict=True):
        for layer in range(count):
            found |= _t5_layer(weights, f"{side}.block.{layer}.layer", f"{side}.layers.{layer}")
    return _loaded(model, found)


def _t5_layer(weights, there, here):
    last = 2 if here.startswith("decoder") else 1
    found = _copied(
        {
            f"{here}.input_layernorm": f"{there}.0.layer_norm",
            f"{here}.self_attention.linear_proj": f"{there}.0.SelfAttention.o",
            f"{here}.pre_mlp_layernorm": f"{there}.{last}.layer_norm",
            f"{here}.mlp.linear_fc2": f"{there}.{last}.DenseReluDense.wo",
        },
        weights,
    )
    # gate and up are halves of one matrix
    wide = [weights[f"{there}.{last}.DenseReluDense.{name}.weight"] for name in ("wi_0", "wi_1")]
    found[f"{here}.mlp.linear_fc1.weight"] = torch.cat(wide)
    q, k, v = (weights[f"{there}.0.SelfAttention.{name}.weight"] for name in "qkv")
    found[f"{here}.self_attention.linear_qkv.weight"] = _by_head(q * sqrt(HEAD_WIDTH), k, v)
    if last == 2:
        # attention to the encoder has its queries apart
        q, k, v = (weights[f"{there}.1.EncDecAttention.{name}.weight"] for name in "qkv")
        found[f"{here}.cross_attention.linear_q.weight"] = q * sqrt(HEAD_WIDTH)
        found[f"{here}.cross_attention.linear_kv.weight"] = _by_head(k, v)
        found |= _copied(
            {
                f"{here}.pre_cross_attn_layernorm": f"{there}.1.layer_norm",
                f"{here}.cross_attention.linear_proj": f"{there}.1.EncDecAttention.o",
            },
            weights,
        )
    return found


def _gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


def _copied(names, weights):
    return {
        f"{ours}.{kind}": weights[f"{theirs}.{kind}"]
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
        if f"{theirs}.{kind}" in weights
    }


def _by_head(*parts):
    """Return the rows of the parts, head by head."""
    return torch.stack([part.view(HEADS, -1, *part.shape[1:]) for part in parts], 1).reshape(
        -1, *parts[0].shape[1:]
    )


def _loaded(model, weights):
    named = dict(model.named_parameters())
    assert named.keys() == weights.keys(), named.keys() ^ weights.keys()
    with torch.no_grad():
        for name, param in named.items():
            param.copy_(weights[name])
    return model.eval()
