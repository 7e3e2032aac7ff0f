"""Small random T5 models of transformers in float64: T5 with a tied head, and T5 1.1 with a gate and a head of its own.

transformers is imported in the functions, and ranks never see it.
"""

import importlib

import torch

KINDS = {
    "t5": {},
    "t5_v1_1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3},
}  # fmt: skip
SIZES = {
    "d_model": 48, "d_ff": 80, "d_kv": 8, "num_layers": 2, "num_heads": 8, "vocab_size": 259, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 16, "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
}  # fmt: skip


def _t5():
    return importlib.import_module("transformers.models.t5.modeling_t5")


def _double_norm(self, hidden_states):
    """T5LayerNorm without its cast to float32."""
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def make_model(kind, seed=0):
    """A model whose every parameter is random; its norms compute in float64."""
    t5 = _t5()
    t5.T5LayerNorm.forward = _double_norm
    config = t5.T5Config(**SIZES | KINDS[kind], attn_implementation="eager")
    model = t5.T5ForConditionalGeneration(config).double().eval()
    if kind == "t5_v1_1":  # the class ties what the configuration does not
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for values in model.parameters():
            noise = 0.2 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
            values.copy_(noise + (1.0 if values.ndim == 1 else 0.0))
    return model


def load_model(folder):
    """Load a folder with the class of transformers that made it."""
    model = _t5().T5ForConditionalGeneration
    return model.from_pretrained(folder, dtype="auto", attn_implementation="eager").eval()


def logits(model, source, target):
    """Logits [B, S, V] of what the decoder reads, [B, S], of sources [B, E]."""
    return model(input_ids=source, decoder_input_ids=target, use_cache=False).logits
