"""What Hugging Face calls our tensors: one table for both directions.

A tensor over there is a stack of ours along dim 0, transposed in GPT-2, whose layers are
convolutions of width 1. RoPE needs no permutation: both sides rotate halves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from raymega.config.schema import ModelSection
from raymega.plan.tensors import GlobalTensor, model_tensors

TABLES = ("embedding.tokens.weight", "head.weight")
"""Tensors with a row per token; ours have padded rows after the vocabulary's."""

# What old files hold beside weights: causal masks and RoPE's angles.
BUFFER = re.compile(r".*\.(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")
HEAD = "lm_head.weight"

_GPT2 = {
    "ln_1": ("attention_norm",),
    "attn.c_attn": ("attention.q", "attention.k", "attention.v"),
    "attn.c_proj": ("attention.out",),
    "ln_2": ("mlp_norm",),
    "mlp.c_fc": ("mlp.up",),
    "mlp.c_proj": ("mlp.down",),
}
_LLAMA = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HfTensor:
    """One of their tensors.

    Attributes:
        name: Their name.
        parts: Ours, in the order in which they lie along dim 0.
        is_transposed: Theirs is the stack's transpose.
        num_rows: Rows of the stack that they have: padded ones are ours alone.
    """

    name: str
    parts: tuple[GlobalTensor, ...]
    is_transposed: bool
    num_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Their shape."""
        stacked = (self.num_rows, *self.parts[0].shape[1:])
        return stacked[::-1] if self.is_transposed else stacked


def hf_tensors(model: ModelSection) -> list[HfTensor]:
    """Every tensor of ``model`` over there, in layer order; a tied head is not one."""
    ours = {tensor.name: tensor for tensor in model_tensors(model)}
    outer = _gpt2_outer() if model.family == "gpt2" else _llama_outer()
    names = dict(outer)
    for layer in range(model.num_layers):
        names |= _gpt2_layer(layer) if model.family == "gpt2" else _llama_layer(layer)
    found = [
        _hf_tensor(f"{theirs}.{kind}", [f"{part}.{kind}" for part in parts], ours, model)
        for theirs, parts in names.items()
        for kind in ("weight", "bias")
        if f"{parts[0]}.{kind}" in ours
    ]
    order = {name: index for index, name in enumerate(ours)}
    return sorted(found, key=lambda tensor: order[tensor.parts[0].name])


def _hf_tensor(
    name: str, parts: list[str], ours: Mapping[str, GlobalTensor], model: ModelSection
) -> HfTensor:
    tensors = tuple(ours[part] for part in parts)
    is_linear = ".attn." in name or ".mlp." in name
    return HfTensor(
        name=name,
        parts=tensors,
        is_transposed=model.family == "gpt2" and is_linear and name.endswith(".weight"),
        num_rows=model.vocab_size if parts[0] in TABLES else sum(t.shape[0] for t in tensors),
    )


def _gpt2_outer() -> dict[str, tuple[str, ...]]:
    return {
        "transformer.wte": ("embedding.tokens",),
        "transformer.wpe": ("embedding.positions",),
        "transformer.ln_f": ("final_norm",),
        "lm_head": ("head",),
    }


def _llama_outer() -> dict[str, tuple[str, ...]]:
    return {
        "model.embed_tokens": ("embedding.tokens",),
        "model.norm": ("final_norm",),
        "lm_head": ("head",),
    }


def _gpt2_layer(layer: int) -> dict[str, tuple[str, ...]]:
    return {
        f"transformer.h.{layer}.{theirs}": tuple(f"layers.{layer}.{part}" for part in parts)
        for theirs, parts in _GPT2.items()
    }


def _llama_layer(layer: int) -> dict[str, tuple[str, ...]]:
    return {
        f"model.layers.{layer}.{theirs}": (f"layers.{layer}.{ours}",)
        for theirs, ours in _LLAMA.items()
    }
