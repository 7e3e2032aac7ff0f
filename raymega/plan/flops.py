"""Floating-point operations that a model asks for, from its section of the job alone.

Model FLOPs: what the mathematics needs, whatever is computed again, padded or masked on the way, so
that two systems are compared by the same count (Chowdhery et al. 2022, PaLM, appendix B).
"""

from __future__ import annotations

from raymega.config.schema import ModelSection
from raymega.plan.tensors import layer_tensors
from raymega.schedule.simulate import Durations

FORWARD_AND_BACKWARD = 3
"""A backward pass multiplies each matrix twice: for its input's gradient and for its own."""


def flops_per_token(model: ModelSection, *, seq_len: float) -> float:
    """Of training on one token: forward and backward.

    A matrix of n weights costs 2 n a token: those of the blocks, and the head, tied or not; looking
    up an embedding costs nothing, norms and biases are not counted. Attention's two products cost
    2 * 2 * (S / 2) * H * K a token and layer: a causal token sees half of the sequence on average.
    Counting the whole S x S square, as Narayanan et al. 2021 and PaLM do, doubles that part; with
    the half, Llama 3 8B at S=8192 needs 51.5 GFLOP a token, the figure of NVIDIA's tables.
    """
    weights = sum(t.num_elements for t in layer_tensors(model, 0) if len(t.shape) == 2)
    attention = 2 * seq_len * model.num_heads * model.head_width
    head = model.vocab_size * model.width
    forward = model.num_layers * (2 * weights + attention) + 2 * head
    return float(FORWARD_AND_BACKWARD * forward)


def pass_times(model: ModelSection, *, seq_len: int) -> Durations:
    """A layer's passes in units of its forward, by the operations that each multiplies.

    The weight part is the matrices' own; the input part has as much and attention's backward, which
    is twice its forward.
    """
    weights = sum(t.num_elements for t in layer_tensors(model, 0) if len(t.shape) == 2)
    matrices, attention = 2 * weights, 2 * seq_len * model.num_heads * model.head_width
    return Durations(forward=1.0, backward=2.0, weight=matrices / (matrices + attention))
