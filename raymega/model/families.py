"""Model families (GPT-2, Llama, Qwen2, Qwen3): the layers that each uses, and the assembly of a block.

`plan/tensor_table.py` decides which tensors a family has (biases, positions, head norms); a layer uses
those that the table lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from raymega.config.schema import ModelSection
from raymega.model.attention.latent_attention import LatentAttention
from raymega.model.attention.rope import Rope
from raymega.model.attention.self_attention import Attention
from raymega.model.layers.mlp import GeluMlp, SwigluMlp
from raymega.model.layers.norms import LayerNorm, RmsNorm
from raymega.model.layers.transformer_block import BlockPart, ResidualDropout, TransformerBlock
from raymega.model.moe.layer import MoeLayer
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups, no_expert_groups
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.plan.tensor_table import block_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Layer types of a family."""

    norm: Callable[[ParameterFactory, str, float], nn.Module]
    mlp: type[GeluMlp] | type[SwigluMlp]
    is_rotary: bool


_LLAMA = Family(norm=RmsNorm, mlp=SwigluMlp, is_rotary=True)
FAMILIES = {
    "gpt2": Family(norm=LayerNorm, mlp=GeluMlp, is_rotary=False),
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


def make_norm(factory: ParameterFactory, name: str, model: ModelSection) -> nn.Module:
    """Return the family's norm layer, with its tensors below ``name``."""
    return FAMILIES[model.family].norm(factory, name, model.norm_eps)


def make_positions(
    model: ModelSection, *, dtype: torch.dtype, device: torch.device, is_fused: bool = False
) -> nn.Module:
    """Return the layer that rotates queries and keys, [S, B, heads, K]; the identity without RoPE."""
    if FAMILIES[model.family].is_rotary:
        return Rope(model, dtype=dtype, device=device, is_fused=is_fused)
    return nn.Identity()


def make_block(
    factory: ParameterFactory,
    layer: int,
    model: ModelSection,
    positions: nn.Module,
    experts: ExpertGroups | None = None,
) -> TransformerBlock:
    """Return transformer block ``layer``; numbers from num_layers on are multi-token prediction blocks.

    ``experts`` are the groups of expert parallelism; None where experts are all on this rank.
    """
    name = block_name(model, layer)
    attention = LatentAttention if model.mla.kv_lora_rank else Attention
    drop = partial(ResidualDropout, factory.seed, rate=model.hidden_dropout)
    return TransformerBlock(
        attention_norm=make_norm(factory, f"{name}.attention_norm", model),
        attention=attention(factory, f"{name}.attention", model, positions),
        attention_dropout=drop(f"{name}.attention"),
        mlp_norm=make_norm(factory, f"{name}.mlp_norm", model),
        mlp=_make_mlp(factory, layer, model, experts),
        mlp_dropout=drop(f"{name}.mlp"),
    )


def _make_mlp(
    factory: ParameterFactory, layer: int, model: ModelSection, experts: ExpertGroups | None
) -> BlockPart:
    """Return the block's dense feed-forward layer, or its layer of experts."""
    mlp, name = FAMILIES[model.family].mlp, block_name(model, layer)
    if model.moe.holds_experts(layer):
        ranks = experts or no_expert_groups(factory.sp)
        return MoeLayer(factory, f"{name}.moe", model.moe, ranks, mlp)
    return mlp(factory, f"{name}.mlp")
