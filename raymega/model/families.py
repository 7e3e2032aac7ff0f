"""Assembly of a block from the parts of its family and of its layer.

`plan/layers/` says which parts these are, and `plan/tensor_table.py` which tensors they have. A layer
uses those that the table lists.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from raymega.config.schema import ModelSection
from raymega.model.attention.latent_attention import LatentAttention
from raymega.model.attention.relative_attention import RelativeAttention
from raymega.model.attention.rope import Rope
from raymega.model.attention.self_attention import Attention
from raymega.model.heads.score_head import ScoreHead
from raymega.model.layers.embedding import Embedding
from raymega.model.layers.encoder_head import HeadTransform, PairHead
from raymega.model.layers.lm_head import Head
from raymega.model.layers.mlp import GeluMlp, SwigluMlp, make_gate, named_activation
from raymega.model.layers.norms import Norm
from raymega.model.layers.transformer_block import BlockPart, ResidualDropout, TransformerBlock
from raymega.model.linear_attention.gated_delta_net import GatedDeltaNet
from raymega.model.linear_attention.mamba2 import Mamba2
from raymega.model.moe.layer import MoeLayer
from raymega.model.stream_block import StreamBlock, StreamEmbedding
from raymega.model.vision.embedding import ImageEmbedding
from raymega.model.vision.tower import VisionTower
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.expert_parallel.dispatcher import ExpertGroups, no_expert_groups
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.plan.layers.encoder_decoder import is_decoder_layer
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.layers.layer_pattern import ALONE, MAMBA, layer_parts, sized_model
from raymega.plan.tensor_table import block_name

TOKEN_TABLE = "embedding.tokens.weight"
"""Name of the token table, which a tied head shares."""


def make_norm(factory: ParameterFactory, name: str, model: ModelSection) -> nn.Module:
    """Return the family's norm layer, with its tensors below ``name``."""
    return Norm(factory, name, parts_of(model).norm, model.norm_eps)


def make_positions(
    model: ModelSection, *, dtype: torch.dtype, device: torch.device, is_fused: bool = False
) -> nn.Module:
    """Return the layer that rotates queries and keys, [S, B, heads, K]; the identity without RoPE."""
    if not parts_of(model).has_rope:
        return nn.Identity()
    return Rope(model, dtype=dtype, device=device, is_fused=is_fused)


def make_embedding(factory: ParameterFactory, model: ModelSection) -> Embedding:
    """Return the family's embedding."""
    parts = parts_of(model)
    if parts.is_encoder_decoder:
        return StreamEmbedding(factory)
    width = model.hidden_size**0.5 if parts.scales_embedding else 1.0
    factor = model.multipliers.embedding * width
    if model.vision.is_on:
        tower, shared = VisionTower(factory, model.vision), model.multipliers.embedding
        # transformers multiplies images by Granite's factor, not by Gemma's, which is a part of the table
        return ImageEmbedding(factory, tower, factor, image_factor=shared)
    return Embedding(
        factory,
        factor,
        first_position=parts.first_position,
        norm=make_norm(factory, "embedding.norm", model) if parts.has_embedding_norm else None,
    )


def make_head(
    factory: ParameterFactory, model: ModelSection, table: ShardedParameter | None
) -> Head:
    """Return the family's head; ``table`` is the token table, which a tied head multiplies with."""
    parts = parts_of(model)
    norm = nn.Identity() if parts.norms == "sum" else make_norm(factory, "final_norm", model)
    own = None if model.tie_word_embeddings else factory.make("head.weight")
    weight = own if own is not None else table
    assert weight is not None, "a tied head has a table"
    if parts.is_causal:
        head = Head(norm, weight, model, factory)
        if parts.is_encoder_decoder and model.tie_word_embeddings:
            head.logit_scale *= model.hidden_size**-0.5
        return head
    transform = HeadTransform(factory, make_norm(factory, "head.transform_norm", model))
    head = Head(norm, weight, model, factory, transform)
    head.segment_pairs = PairHead(factory) if model.encoder.has_pairs else None
    return head


def make_score_head(factory: ParameterFactory, model: ModelSection) -> ScoreHead:
    """Return the head of ``model.head`` behind the family's final norm."""
    has_norm = parts_of(model).norms != "sum"
    return ScoreHead(
        factory, make_norm(factory, "final_norm", model) if has_norm else nn.Identity()
    )


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
    name, parts = block_name(model, layer), layer_parts(model, layer)
    drop = partial(ResidualDropout, factory.seed, rate=model.hidden_dropout)

    def norm(part: str) -> nn.Module | None:
        is_there = part in parts.family.norm_places
        return make_norm(factory, f"{name}.{part}", model) if is_there else None

    if parts.family.is_encoder_decoder:
        inside, is_decoder = f"{name}.cross_attention", is_decoder_layer(model, layer)
        is_end = layer + 1 == model.encoder_decoder.num_encoder_layers
        return StreamBlock(
            cross=(
                make_norm(factory, f"{inside}_norm", model),
                RelativeAttention(factory, inside, model, is_cross=True),
                drop(inside),
            )
            if is_decoder
            else None,
            end=(make_norm(factory, f"{name}.encoder_norm", model), drop("encoder_end"))
            if is_end
            else None,
            attention_norm=norm("attention_norm"),
            attention=RelativeAttention(factory, f"{name}.attention", model),
            attention_dropout=drop(f"{name}.attention"),
            mlp_norm=norm("mlp_norm"),
            mlp=_make_mlp(factory, layer, model, experts),
            mlp_dropout=drop(f"{name}.mlp"),
        )
    one_part = norm("norm")
    has_mixer = parts.attention not in ALONE
    after = norm("attention_post_norm"), norm("mlp_post_norm")
    of_sums = norm("attention_sum_norm"), norm("mlp_sum_norm")
    return TransformerBlock(
        attention_norm=one_part if has_mixer and one_part else norm("attention_norm"),
        attention=_make_attention(factory, layer, model, positions) if has_mixer else None,
        attention_dropout=drop(f"{name}.attention"),
        mlp_norm=norm("mlp_norm") if has_mixer else one_part,
        mlp=_make_mlp(factory, layer, model, experts) if parts.has_feed_forward else None,
        mlp_dropout=drop(f"{name}.mlp"),
        post_norms=after,
        sum_norms=of_sums,
        is_parallel=parts.family.is_parallel,
        factor=model.multipliers.residual,
    )


def _make_attention(
    factory: ParameterFactory, layer: int, model: ModelSection, positions: nn.Module
) -> BlockPart:
    """Return the block's attention, with the rotation that its layer has."""
    at, parts = block_name(model, layer), layer_parts(model, layer)
    name, model = f"{at}.attention", sized_model(model, layer)
    if parts.is_linear:
        make = Mamba2 if parts.attention == MAMBA else GatedDeltaNet
        return make(factory, f"{at}.linear_attention", model)
    if model.mla.kv_lora_rank:
        return LatentAttention(factory, name, model, positions)
    if parts.rope == "none":
        positions = nn.Identity()
    elif parts.rope == "local":
        assert isinstance(positions, Rope), "the layer has RoPE"
        assert positions.local is not None, "sliding layers have a base of their own"
        positions = positions.local
    return Attention(factory, name, model, positions, parts)


def _make_mlp(
    factory: ParameterFactory, layer: int, model: ModelSection, experts: ExpertGroups | None
) -> BlockPart:
    """Return the block's dense feed-forward layer, or its layer of experts."""
    parts, name = layer_parts(model, layer), block_name(model, layer)
    activation = parts.family.activation
    has_gate = parts.family.has_gate
    inside = make_gate(activation, model) if has_gate else named_activation(activation)
    mlp = partial(SwigluMlp, inside=inside) if has_gate else partial(GeluMlp, activation=activation)
    if parts.has_experts:
        ranks = experts or no_expert_groups(factory.sp)
        return MoeLayer(factory, f"{name}.moe", model.moe, ranks, mlp, inside)
    return mlp(factory, f"{name}.mlp")
