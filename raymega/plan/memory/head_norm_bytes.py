"""Compute the bytes that norms of queries and keys keep for backward, and queries by temperature."""

from __future__ import annotations

from raymega.plan.layers.layer_pattern import attention_layers, copied_share
from raymega.plan.memory.activation_shape import ActivationShape


def head_norm_bytes(shape: ActivationShape, *, heads: int, kv_heads: int) -> int:
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


def tempered_bytes(shape: ActivationShape, heads: int) -> int:
    """Return the bytes of queries by temperature, beside those that k and v's tensor holds."""
    model = shape.model
    if not model.attention.temperature_floor or shape.parallel.cp > 1:
        return 0
    layers = attention_layers(model)
    share = sum(parts.attention == "no_positions" for parts in layers) / len(layers)
    return round(shape.tokens * share * heads * model.head_width * shape.element)
