"""Compute what the kernels of a backward hold on a GPU beyond what was kept for it, moment by moment.

A backward is at its fullest in the loss, in the head, or in the feed-forward layer
or the attention of the first block that it comes to. Each part below was found in the snapshots of
torch's allocator on the device of ``docs/gpu.md``. Kernels of a CPU work in portions and hold nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.plan.cp_layout import inner_ranks
from raymega.plan.layers.layer_pattern import state_share
from raymega.plan.memory.activation_bytes import (
    expert_rows,
    feed_forward_bytes,
    head_shape,
    vocabulary_rows,
)
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.plan.memory.linear_attention_bytes import linear_working_bytes
from raymega.planner.cost.context_cost import shape_cost


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkingMemory:
    """Bytes that kernels hold in each moment of a backward; less what is gone, so they may be negative.

    Attributes:
        loss: Bytes in cross entropy.
        head: Bytes in the head's linear layer.
        feed_forward: Bytes in a block's feed-forward layer or experts.
        attention: Bytes in a block's attention.
    """

    loss: int
    head: int
    feed_forward: int
    attention: int


def working_memory(shape: ActivationShape, *, has_experts: bool) -> WorkingMemory:
    """Return what kernels hold on a rank of ``shape`` that has blocks with or without experts."""
    return WorkingMemory(
        loss=logits_copy_bytes(shape),
        head=head_bytes_in_backward(shape),
        feed_forward=feed_forward_bytes_in_backward(shape, has_experts=has_experts),
        attention=attention_bytes_in_backward(shape, has_experts=has_experts),
    )


def logits_copy_bytes(shape: ActivationShape) -> int:
    """Return the bytes of the float32 copy of narrower logits in cross entropy, in either direction.

    A compiled kernel makes none.
    """
    if shape.is_fused or not _is_narrow(shape):
        return 0
    return head_shape(shape).tokens * vocabulary_rows(shape) * shape.wide


def head_bytes_in_backward(shape: ActivationShape) -> int:
    """Return the bytes of the head's linear layer in backward, while the logits' gradient exists."""
    return _column_bytes(head_shape(shape))


def feed_forward_bytes_in_backward(shape: ActivationShape, *, has_experts: bool) -> int:
    """Return the bytes of a feed-forward layer in backward, less what it has let go of by then."""
    incoming, gates = shape.stream_bytes, 2 if shape.family.has_gate else 1
    parallel, width = shape.parallel, shape.model.hidden_size
    if has_experts:
        rows, features = round(expert_rows(shape)), shape.model.expert_width // parallel.etp
        # gradient of the rows that experts returned
        incoming += rows * width * shape.element
    else:
        rows, features = shape.tokens, shape.model.ffn_hidden_size // parallel.tp
    hidden = rows * features * shape.element
    made = 0 if shape.remakes("activation") else hidden
    # nonlinearity: gradients of its output and inputs, and the sigmoid of an uncompiled kernel
    sigmoid = hidden if gates == 2 and not shape.is_fused else 0
    inside = hidden + gates * hidden + sigmoid - made
    if has_experts:
        return incoming + max(inside, rows * width * shape.element - made)
    # the layer behind it: the gradient of its input, from gradients of all tokens
    whole = shape.tokens * width * shape.element if parallel.sequence_parallel else 0
    behind = whole + hidden
    # then its weight's gradient is held back, with both factors
    held = _held_bytes(shape) + (hidden if _held_bytes(shape) else 0)
    # the layer before it: gradients of its outputs exist, outputs do not
    before = _column_bytes(shape) - made
    return incoming + max(inside + held, behind, before + held)


def attention_bytes_in_backward(shape: ActivationShape, *, has_experts: bool) -> int:
    """Return the bytes of attention in backward, less those of the feed-forward layer, which is done.

    They are gradients of the output, of q, k and v, and of these joined. Outer context-parallel ranks
    add up float32 gradients, and other ranks' keys, values and gradients pass.
    """
    model, parallel = shape.model, shape.parallel
    heads, kv_heads = model.num_heads // parallel.tp, max(1, model.kv_heads // parallel.tp)
    output = shape.tokens * heads * model.head_width
    joined = output + 2 * shape.tokens * kv_heads * model.head_width
    is_outer = parallel.cp > inner_ranks(parallel)
    own = joined * (shape.element + (shape.wide if is_outer else shape.element))
    # Unfused: one gradient [S, S] a head more than the weights, mask and product that were kept.
    weights = shape.tokens * heads * shape.seq_len * shape.element if model.attention_dropout else 0
    working = shape.stream_bytes + output * shape.element + own + weights + passing_bytes(shape)
    if state_share(model):  # chunks of a layer with states, while it is recomputed
        working = max(working, shape.stream_bytes + linear_working_bytes(shape))
    gone = feed_forward_bytes(shape, has_experts=has_experts)
    return working + _held_bytes(shape) - (0 if shape.family.has_one_part else gone)


def passing_bytes(shape: ActivationShape) -> int:
    """Return the bytes of other ranks' keys, values and gradients while one layer runs."""
    if shape.parallel.cp == 1:
        return 0
    return round(shape_cost(shape, shape.parallel.cp_method).passing_bytes)


def transfer_bytes(shape: ActivationShape, *, num_neighbours: int) -> int:
    """Return the bytes of the pipeline's transfers: to each neighbour a send, from each a receive."""
    return 2 * num_neighbours * shape.stream_bytes


def _column_bytes(shape: ActivationShape) -> int:
    """Return the bytes of a column-parallel layer in backward: its input's gradient.

    Its weight's gradient is added in float32 by the product itself. With sequence parallelism there are
    also the input that is gathered, and this rank's part of the sum.
    """
    whole = shape.tokens * shape.model.hidden_size * shape.element
    return whole + (whole + shape.stream_bytes if shape.parallel.sequence_parallel else 0)


def _held_bytes(shape: ActivationShape) -> int:
    """Return the bytes of a row layer's gathered gradient while its weight's gradient is held back."""
    if not shape.is_tp_overlapped or shape.fp8_coverage.linears:
        return 0
    return shape.tokens * shape.model.hidden_size * shape.element


def _is_narrow(shape: ActivationShape) -> bool:
    return shape.element < shape.wide
