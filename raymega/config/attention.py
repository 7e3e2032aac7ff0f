"""The job file's model.attention, model.layer_sizes, model.linear_attention and model.multipliers sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from raymega.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

LayerType = Literal[
    "full",
    "sliding",
    "chunked",
    "no_positions",
    "gated_delta_net",
    "mamba2",
    "feed_forward",
    "experts",
]


def as_tuple(value: object) -> object:
    """Return a list of JSON, such as that of a checkpoint's model section, as a tuple."""
    return tuple(value) if isinstance(value, list) else value


LayerTypes = Annotated[tuple[LayerType, ...], Field(min_length=1), BeforeValidator(as_tuple)]


class AttentionSection(Section):
    """Attention of each layer: what a token sees, how scores are made, and which features RoPE turns."""

    # Kinds of layers.
    layer_types: LayerTypes = ("full",)
    """Kind of each layer's attention, repeated from layer 0 to the last. full: all earlier tokens of
    the document. sliding: the last sliding_window tokens. chunked: those of its own chunk of the
    document. no_positions: full, without RoPE. gated_delta_net, mamba2: a state of fixed size in place
    of attention, with the sizes of model.linear_attention. feed_forward, experts: blocks of nemotron_h without
    attention, dense or of model.moe."""
    sliding_window: NonNegative = 0
    """Number of tokens that a token of a sliding layer sees, itself included; 0 without such layers."""
    chunk_size: NonNegative = 0
    """Number of tokens in a chunk of chunked layers; 0 without such layers."""
    # Scores.
    score_scale: NonNegativeFloat = 0.0
    """Factor on q k^T; 0 is 1 / sqrt(width of a head)."""
    softcap: NonNegativeFloat = 0.0
    """Scaled scores s become softcap * tanh(s / softcap); 0 leaves them as they are."""
    sinks: bool = False
    """Add one learned score a head to each softmax, without a value: a token may attend to nothing."""
    temperature_floor: NonNegative = 0
    """no_positions layers: query p is multiplied by 1 + temperature_scale log(1 + floor((p + 1) /
    temperature_floor)), p its position in the document. 0 leaves queries as they are."""
    temperature_scale: PositiveFloat = 0.1
    """Growth of that factor."""
    # Rotary position embedding.
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head's features that RoPE turns; they are its first."""
    sliding_rope_theta: NonNegativeFloat = 0.0
    """Base of RoPE's wavelengths in sliding layers, which then have no rope_scaling; 0 treats them as
    the other layers."""
    # Parts that only some models of a family have.
    qk_norm: Literal["family", "none"] = "family"
    """none: leave out the norms of queries and keys that the family has."""


class LinearAttentionSection(Section):
    """States of layers of kind gated_delta_net (Yang et al. 2024) or mamba2 (Dao and Gu 2024)."""

    num_key_heads: NonNegative = 0
    """Query and key heads; of mamba2 groups of heads that share B and C. parallel.tp and parallel.cp share them
    out. 0 without such layers."""
    num_value_heads: NonNegative = 0
    """Value heads, a multiple of num_key_heads; each has a state of key_head_dim x value_head_dim."""
    key_head_dim: NonNegative = 0
    """Features of a query or key head, of B and of C."""
    value_head_dim: NonNegative = 0
    """Features of a value head."""
    conv_kernel_dim: Positive = 4
    """Number of tokens that the convolution before the state sees, the token itself included."""
    time_step_min: NonNegativeFloat = 0.0
    """mamba2: least time step of a token, by which its value and the state's decay are multiplied."""


class MultipliersSection(Section):
    """Constant factors on the embedding, on what is added to the residual stream, and on the logits."""

    embedding: PositiveFloat = 1.0
    """Factor on the embedded tokens; gemma2 and gemma3 multiply by sqrt(hidden_size) as well."""
    residual: PositiveFloat = 1.0
    """Factor on what each attention and feed-forward layer adds to the residual stream."""
    logits_scaling: PositiveFloat = 1.0
    """Divisor of the logits."""
    logit_softcap: NonNegativeFloat = 0.0
    """Divided logits l become logit_softcap * tanh(l / logit_softcap); 0 leaves them as they are."""


Sizes = Annotated[tuple[Positive, ...], BeforeValidator(as_tuple)]


class LayerSizesSection(Section):
    """Sizes of each layer where they differ, repeated from layer 0 to the last; an empty list is the model's own.

    The model's field of the same name then is the largest of the list.
    """

    ffn_hidden_size: Sizes = ()
    """F of each layer's dense feed-forward layer."""
    num_heads: Sizes = ()
    """H of each layer; model.head_dim is then a number."""
    num_kv_heads: Sizes = ()
    """G of each layer."""

    @property
    def is_on(self) -> bool:
        """True where some size differs by layer."""
        return bool(self.ffn_hidden_size or self.num_heads or self.num_kv_heads)

    def of(self, layer: int) -> dict[str, int]:
        """Return the sizes of block ``layer`` by field of the model section; none that are the model's own."""
        return {name: sizes[layer % len(sizes)] for name, sizes in self if sizes}
