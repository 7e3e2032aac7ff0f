"""Small random models of transformers, in folders and in float64. The import takes seconds, so it
happens in the functions, and ranks never see it."""

import importlib
from contextlib import contextmanager

import torch

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 259,
    "max_position_embeddings": 40,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
GPT2 = {
    "n_embd": 48, "n_layer": 3, "n_head": 8, "vocab_size": 259, "n_positions": 40,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", {**GPT2, "tie_word_embeddings": False, "n_inner": 80}),
    "llama2": ("Llama", {**SIZES, "num_key_value_heads": 8}),
    "llama3": ("Llama", {**SIZES, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 10}),
}
MODULES = {name: f"transformers.models.{name.lower()}.modeling_{name.lower()}" for name in
           ("GPT2", "Llama", "Qwen2", "Qwen3")}  # fmt: skip


def make_model(kind, *, seed=0, dtype=torch.float64):
    """A model whose every parameter is random: no zero biases or unit norms to hide a mistake."""
    family, fields = KINDS[kind]
    module = importlib.import_module(MODULES[family])
    config = getattr(module, f"{family}Config")(**fields)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(module, f"{family}{head}")(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            noise = 0.2 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
            values.copy_(noise + (1.0 if values.ndim == 1 and "bias" not in name else 0.0))
    return model


def load_model(folder):
    """What transformers makes of a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


class _Torch:
    """torch, whose float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def in_float64(model):
    """Their code, without its casts to float32 in norms and in RoPE's angles."""
    names = {type(part).__module__ for part in model.modules()}
    modules = [importlib.import_module(name) for name in names if name.startswith("transformers")]
    modules.append(importlib.import_module("transformers.modeling_rope_utils"))
    before, plain = [module.__dict__.get("torch") for module in modules], torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    for module in modules:
        module.torch = _Torch()
    try:
        if rope := getattr(model.base_model, "rotary_emb", None):
            fresh = type(rope)(model.config)
            rope.inv_freq = fresh.inv_freq
        yield model
    finally:
        torch.Tensor.float = plain
        for module, torch_before in zip(modules, before, strict=True):
            module.torch = torch_before


def logits(model, tokens):
    """tokens: [B, S] -> [B, S, V], in float64 throughout."""
    with in_float64(model):
        return model(tokens).logits
