"""Define the table of a model's layers: kind of attention, window, rotation, feed-forward kind, norms.

Model build, planner, validation and conversion read it. The tensors of a layer are in
`plan/tensor_table.py`, and the parts that all layers of a family share in `family_parts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from raymega.config.attention import LayerType
from raymega.config.schema import ModelSection
from raymega.plan.layers.family_parts import FamilyParts, parts_of

DELTA_NET: LayerType = "gated_delta_net"
MAMBA: LayerType = "mamba2"
STATES = (DELTA_NET, MAMBA)
"""Kinds of layers with a state of fixed size in place of attention."""
FEED_FORWARD: LayerType = "feed_forward"
EXPERTS: LayerType = "experts"
ALONE = (FEED_FORWARD, EXPERTS)
"""Kinds of blocks without attention and state."""


LayerKind = tuple[str, bool, tuple[int, ...]]
"""Kind of a layer: its attention, whether it has experts, and its own sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParts:
    """Parts of one transformer block.

    Attributes:
        attention: Kind of attention.
        window: Number of tokens that a token sees, itself included; 0 is all earlier ones.
        chunk: Number of tokens of a chunk, in which a token sees the earlier ones; 0 is no chunks.
        rope: Rotation of queries and keys: none, that of the model, or that of sliding layers.
        has_experts: Whether a layer of experts takes the place of the feed-forward layer.
        family: Parts that all layers share.
    """

    attention: LayerType
    window: int
    chunk: int
    rope: Literal["none", "global", "local"]
    has_experts: bool
    family: FamilyParts

    @property
    def is_linear(self) -> bool:
        """Return whether a state of fixed size takes the place of attention."""
        return self.attention in STATES

    @property
    def has_feed_forward(self) -> bool:
        """Return whether the block has a feed-forward layer or experts."""
        return not self.family.has_one_part or self.attention in ALONE


def layer_parts(model: ModelSection, layer: int) -> LayerParts:
    """Return the parts of block ``layer``; blocks of multi-token prediction continue the pattern."""
    attention, family = model.attention, parts_of(model)
    kind = attention.layer_types[layer % len(attention.layer_types)]
    rope: Literal["none", "global", "local"] = "global"
    if not family.has_rope or kind in ("no_positions", *ALONE, *STATES):
        rope = "none"
    elif kind == "sliding" and attention.sliding_rope_theta:
        rope = "local"
    return LayerParts(
        attention=kind,
        window=attention.sliding_window if kind == "sliding" else 0,
        chunk=attention.chunk_size if kind == "chunked" else 0,
        rope=rope,
        has_experts=model.holds_experts(layer),
        family=family,
    )


def sized_model(model: ModelSection, layer: int) -> ModelSection:
    """Return the model section with the sizes of block ``layer``, which is the model's own where all are alike."""
    sizes = model.layer_sizes.of(layer) if model.layer_sizes.is_on else {}
    if not sizes:
        return model
    return model.model_copy(update={**sizes, "layer_sizes": type(model.layer_sizes)()})


def one_layer(model: ModelSection, layer: int) -> ModelSection:
    """Return the section of a model whose only block is as block ``layer``: means over its layers are of this one."""
    kinds, moe = model.attention.layer_types, model.moe
    kind = kinds[layer % len(kinds)]
    attention = model.attention.model_copy(update={"layer_types": (kind,)})
    is_dense = not model.holds_experts(layer)
    at_once = moe.model_copy(update={"first_k_dense_replace": int(is_dense), "layer_freq": 1})
    return sized_model(model, layer).model_copy(
        update={"attention": attention, "moe": at_once, "num_layers": 1}
    )


def layer_kind(model: ModelSection, layer: int) -> LayerKind:
    """Return what of a layer's number decides its cost: kind of attention, experts, and sizes of its own."""
    kinds, sizes = model.attention.layer_types, model.layer_sizes
    own = tuple(sizes.of(layer).values()) if sizes.is_on else ()
    return kinds[layer % len(kinds)], model.holds_experts(layer), own


def layer_pattern(model: ModelSection) -> list[LayerParts]:
    """Return the parts of each block of the model, in order."""
    return [layer_parts(model, layer) for layer in range(model.num_layers)]


def tensor_kind(model: ModelSection, layer: int) -> tuple[str, bool, int, tuple[int, ...]]:
    """Return what of a layer's number decides its tensors: attention, kind of state or none; experts; side; sizes.

    A side is 0, or in an encoder-decoder model 1 in the encoder's last block, with a norm more, and 2 in the decoder.
    """
    kinds, side = model.attention.layer_types, 0
    kind = kinds[layer % len(kinds)]
    is_apart = kind in (*ALONE, *STATES)
    if parts_of(model).is_encoder_decoder:
        last = model.encoder_decoder.num_encoder_layers - 1
        side = (layer >= last) + (layer > last)
    sizes = layer_kind(model, layer)[2]
    return kind if is_apart else "attention", model.holds_experts(layer), side, sizes


@lru_cache(maxsize=16)
def kinds_of_layers(model: ModelSection) -> tuple[str, ...]:
    """Return for each layer ``attention``, its kind of state, ``feed_forward`` or ``experts``."""
    return tuple(tensor_kind(model, layer)[0] for layer in range(model.num_layers))


def state_kind(model: ModelSection) -> str:
    """Return the kind of the model's layers with states; empty without such layers."""
    return next((kind for kind in STATES if kind in model.attention.layer_types), "")


def is_mixed(model: ModelSection) -> bool:
    """Return whether some blocks have states in place of attention, or a feed-forward layer or experts alone."""
    return bool({*ALONE, *STATES}.intersection(model.attention.layer_types))


def has_unlike_layers(model: ModelSection) -> bool:
    """Return whether layers differ in sizes, or in kinds of attention that cost differing times."""
    return model.layer_sizes.is_on or len(set(model.attention.layer_types)) > 1


def mixer_share(model: ModelSection) -> float:
    """Return the share of blocks with attention or a state."""
    kinds = kinds_of_layers(model)
    return 1 - sum(map(kinds.count, ALONE)) / model.num_layers


def state_share(model: ModelSection) -> float:
    """Return the share of blocks with states among those with attention or a state."""
    kinds = [kind for kind in kinds_of_layers(model) if kind not in ALONE]
    return sum(kind in STATES for kind in kinds) / max(1, len(kinds))


def attention_layers(model: ModelSection) -> list[LayerParts]:
    """Return the parts of the blocks with attention, in order."""
    kinds = zip(layer_pattern(model), kinds_of_layers(model), strict=True)
    return [parts for parts, kind in kinds if kind == "attention"]


def copied_share(model: ModelSection) -> float:
    """Return the share of layers whose attention copies k and v: those with windows, soft caps or sinks."""
    if model.attention.softcap or model.attention.sinks:
        return 1.0
    layers = attention_layers(model)
    return sum(parts.window + parts.chunk > 0 for parts in layers) / len(layers)


def mean_keys(model: ModelSection, *, seq_len: float) -> float:
    """Return twice the number of keys that a token sees, as a mean over tokens and layers with attention.

    It is seq_len without windows and chunks: a causal token sees half of the sequence on average. A token
    of an encoder sees all.
    """
    if not parts_of(model).is_causal:
        return 2 * seq_len
    if not model.attention.sliding_window and not model.attention.chunk_size:
        return seq_len
    seen = [_keys_seen(parts, seq_len) for parts in attention_layers(model)]
    return sum(seen) / max(1, len(seen))


def _keys_seen(parts: LayerParts, seq_len: float) -> float:
    """Return twice the mean number of keys that a token of one layer sees."""
    window = parts.window
    if parts.chunk and parts.chunk < seq_len:
        # whole chunks, and a shorter one at the end: a triangle each
        whole, rest = divmod(seq_len, parts.chunk)
        return (whole * parts.chunk**2 + rest**2) / seq_len
    if not window or window >= seq_len:
        return seq_len
    # the first tokens see a triangle, the others ``window`` tokens each
    return window * (2 - window / seq_len)
