"""Compute the bytes that attention keeps for backward: queries, keys and values, their norms, weights, latents."""

from __future__ import annotations

from raymega.plan.cp_layout import inner_ranks
from raymega.plan.layers.layer_pattern import attention_layers, copied_share
from raymega.plan.memory.activation_shape import MASK_BYTES, ActivationShape
from raymega.plan.memory.linear_attention_bytes import residual_mask_bytes


def full_attention_bytes(shape: ActivationShape) -> int:
    """Return the bytes that a layer with attention keeps.

    They are q, k and v; the weights or, fused, a number a row; the output, which is the next input.
    """
    model, tp = shape.model, shape.parallel.tp
    heads, kv_heads = model.num_heads // tp, max(1, model.kv_heads // tp)
    qkv = shape.tokens * (heads + 2 * kv_heads) * model.head_width * shape.element
    # an output gate, which is a part of the projection's result, and beside it its sigmoid and the product
    gate = shape.tokens * heads * model.head_width * shape.element * shape.family.has_output_gate
    if shape.remakes("attention"):
        return qkv + gate + residual_mask_bytes(shape)
    qkv += gate * (3 if shape.parallel.cp == 1 else 2)
    qkv += _head_norm_bytes(shape, heads=heads, kv_heads=kv_heads)
    qkv += _tempered_bytes(shape, heads)
    output = shape.tokens * heads * model.head_width * shape.element
    inner = inner_ranks(shape.parallel) if shape.parallel.cp > 1 else 1
    if inner > 1:  # kept before heads are exchanged back, too; shared key heads are copied
        copied = max(0, inner - kv_heads)
        qkv += 2 * shape.tokens * copied * model.head_width * shape.element
        output *= 2
    # Fused attention keeps the log-sum-exp of each row.
    fused = shape.tokens * heads * shape.wide
    weights = attention_weight_bytes(shape) if model.attention_dropout else fused
    return qkv + output + weights + residual_mask_bytes(shape)


def latent_attention_bytes(shape: ActivationShape) -> int:
    """Return the bytes that latent attention keeps.

    They are latents before and after their norms; q, k and v as wide as k; and the output, as wide
    as k and as wide as v.
    """
    mla, parallel, element = shape.model.mla, shape.parallel, shape.element
    ranks = mla.q_lora_rank + mla.kv_lora_rank
    latents = (2 * ranks + mla.qk_rope_head_dim) * element + (
        2 if mla.q_lora_rank else 1
    ) * shape.wide
    kept = shape.stream_tokens * latents + residual_mask_bytes(shape)
    rows = shape.tokens * shape.model.num_heads // parallel.tp
    width, values = shape.model.head_width, mla.v_head_dim
    # With recompute the projections' results are kept, not q, k and v.
    if shape.remakes("attention"):
        made = rows * (width + mla.qk_nope_head_dim + values)
        gathered = shape.tokens - shape.stream_tokens and shape.tokens * mla.qk_rope_head_dim
        return kept + (made + gathered) * element
    is_dropped = shape.model.attention_dropout > 0
    is_exchanged = parallel.cp > 1 and inner_ranks(parallel) > 1
    before = 0 if is_dropped or (values == width and not is_exchanged) else width
    weights = attention_weight_bytes(shape) if is_dropped else rows * shape.wide
    return kept + rows * (3 * width + before + values) * element + weights


def attention_weight_bytes(shape: ActivationShape) -> int:
    """Return the bytes of the [S, S] softmax of all heads here, its dropout mask and the product.

    They are 5 as^2b / t in bf16.
    """
    rows = shape.model.num_heads // shape.parallel.tp * shape.tokens
    return rows * shape.seq_len * (2 * shape.element + MASK_BYTES)


def _head_norm_bytes(shape: ActivationShape, *, heads: int, kv_heads: int) -> int:
    """Return the bytes that norms of queries and keys keep beyond their outputs.

    One weight for all heads: q and k before, and a number a head. One over all features: what it
    normalises, in max(fp32, dtype), before and after, and a number for each of q and k.

    The projection's result is one tensor, q, k and v. Whatever views a part of it keeps all.
    """
    kind, width = shape.family.qk_norm, shape.model.head_width
    features, values = (heads + kv_heads) * width, kv_heads * width
    if kind == "none":
        return 0
    is_alone, copied = shape.parallel.cp == 1, copied_share(shape.model)
    # The norm views q and k in it: v is kept a second time where attention copies v.
    viewed = features + (copied * values if is_alone else 0.0)
    if kind == "l2":
        return _late_norm_bytes(shape, heads + kv_heads)
    if kind == "heads":
        return round(shape.tokens * (viewed * shape.element + (heads + kv_heads) * shape.wide))
    numbers = (features + 2) * shape.wide
    if shape.wide == shape.element:
        return round(shape.tokens * (viewed * shape.element + numbers))
    # The norm has a wide copy: attention's v alone views q and k.
    narrow = (1 - copied) * features * shape.element if is_alone else 0.0
    return round(shape.tokens * (narrow + features * shape.wide + numbers))


def _late_norm_bytes(shape: ActivationShape, num_heads: int) -> int:
    """Return the bytes of norms after RoPE, a mean over layers: what they normalise, and a number a head.

    Attention's v views the projection's result and keeps q and k there too, unless it is copied.
    """
    model, layers = shape.model, attention_layers(shape.model)
    turned = [parts for parts in layers if parts.rope != "none"]
    has_views = shape.parallel.cp == 1 and not (model.attention.softcap or model.attention.sinks)
    viewing = [parts for parts in turned if has_views and not (parts.window or parts.chunk)]
    features = (len(turned) + len(viewing)) * num_heads * model.head_width * shape.element
    numbers = len(turned) * num_heads * shape.wide
    return round(shape.tokens * (features + numbers) / len(layers))


def _tempered_bytes(shape: ActivationShape, heads: int) -> int:
    """Return the bytes of queries by temperature, beside those that k and v's tensor holds."""
    model = shape.model
    if not model.attention.temperature_floor or shape.parallel.cp > 1:
        return 0
    layers = attention_layers(model)
    share = sum(parts.attention == "no_positions" for parts in layers) / len(layers)
    return round(shape.tokens * share * heads * model.head_width * shape.element)
