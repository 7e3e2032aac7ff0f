"""Compute the bytes that layers with a state in place of attention keep, and hold while they run.

Backward recomputes their states, norms and gates, so that little is kept
(``raymega.model.linear_attention``).
"""

from __future__ import annotations

from raymega.plan.layers.layer_pattern import DELTA_NET, state_kind
from raymega.plan.memory.activation_shape import MASK_BYTES, ActivationShape

CHUNK = 64
"""Tokens that are solved together; as in ``raymega.model.linear_attention.delta_rule``."""


def projected_features(shape: ActivationShape) -> int:
    """Return the features of a rank's projections: queries, keys, values, gates, and numbers of a value head."""
    sizes = shape.model.linear_attention
    numbers = 2 if state_kind(shape.model) == DELTA_NET else 1
    keys = 2 * sizes.num_key_heads * sizes.key_head_dim
    values = sizes.num_value_heads * (2 * sizes.value_head_dim + numbers)
    return (keys + values) // shape.parallel.tp


def value_features(shape: ActivationShape) -> int:
    """Return the features of all value heads of a rank."""
    sizes = shape.model.linear_attention
    return sizes.num_value_heads * sizes.value_head_dim // shape.parallel.tp


def linear_bytes(shape: ActivationShape) -> int:
    """Return the bytes that a layer with states keeps: its projections, and what is read of its states."""
    features = projected_features(shape)
    if not shape.remakes("attention"):
        features += value_features(shape)
    return shape.tokens * features * shape.element + residual_mask_bytes(shape)


def linear_working_bytes(shape: ActivationShape) -> int:
    """Return the bytes that the chunked form holds while backward recomputes one layer.

    All is in float32 or better, as counted by autograd's hooks. Of a value head these are, a token: its row of
    the chunk's matrices, keys and values of several kinds, the chunks' states, and the convolution's terms.
    Mamba-2 holds less, as it solves no system.
    """
    sizes = shape.model.linear_attention
    heads = sizes.num_value_heads // shape.parallel.tp
    keys, values = sizes.key_head_dim, sizes.value_head_dim
    shared = sizes.num_key_heads / sizes.num_value_heads  # what value heads have of a key head
    matrices = (4 + 2 * shared) * CHUNK
    vectors = (4 + 6 * shared) * keys + 3 * values
    convolution = CONVOLUTION_TERMS * (2 * shared * keys + values)
    a_token = matrices + vectors + convolution + keys * values / CHUNK
    return round(shape.tokens * heads * a_token * shape.wide)


CONVOLUTION_TERMS = 6
"""Tensors of the size of the convolution's input: earlier tokens, masked, the sum, its nonlinearity."""


def residual_mask_bytes(shape: ActivationShape) -> int:
    """Return the bytes of the mask of dropout before a residual sum; 0 without dropout."""
    if not shape.model.hidden_dropout:
        return 0
    return shape.stream_tokens * shape.model.hidden_size * MASK_BYTES
