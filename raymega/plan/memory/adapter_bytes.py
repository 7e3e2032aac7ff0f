"""Compute the bytes that LoRA's adapters keep for backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from raymega.config.schema import ModelSection
from raymega.plan.adapters import LORA_A, MAGNITUDE
from raymega.plan.memory.activation_shape import MASK_BYTES, ActivationShape
from raymega.plan.tensor_table import layer_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class _AdapterFeatures:
    """Adapters of one block on a rank.

    Attributes:
        layers: Number of adapted linear layers.
        expert_layers: Number of adapted projections of experts.
        stream: Input features of those that read the residual stream or whole latents, in all.
        inner: Input features on this rank of those that tp cuts by input feature, in all.
        rescaled: Output features on this rank of those that return all tokens and are rescaled by DoRA, in all.
        rescaled_stream: The same of those that return the rank's part of the stream, or whole latents.
        rescaled_experts: The same of projections of experts.
    """

    layers: int
    expert_layers: int
    stream: int
    inner: int
    rescaled: int
    rescaled_stream: int
    rescaled_experts: int


def adapter_bytes(shape: ActivationShape, *, has_experts: bool, num_expert_rows: int) -> int:
    """Return the bytes that LoRA's adapters of one block keep: each B's input and, with dropout, each A's.

    A's input is then the layer's after dropout, with its mask; without, it is the layer's own. DoRA keeps the outputs
    that it rescales. Blocks of one kind count as the one with most. Experts' adapters have no dropout.

    Args:
        shape: Sizes and options of the job.
        has_experts: Whether the block has experts.
        num_expert_rows: Number of rows that the rank's experts process.
    """
    shares = _adapter_features(shape.model, has_experts=has_experts, tp=shape.parallel.tp)
    rank, element = shape.model.lora.r, shape.element
    dropped = element + MASK_BYTES if shape.model.lora.lora_dropout else 0
    return max(
        (
            each.layers * shape.stream_tokens * rank * element
            + each.expert_layers * num_expert_rows * rank * element
            + (shape.stream_tokens * each.stream + shape.tokens * each.inner) * dropped
            + shape.stream_tokens * each.rescaled_stream * element
            + (shape.tokens * each.rescaled + num_expert_rows * each.rescaled_experts) * element
            + _norm_bytes(each, shape)
            for each in shares
        ),
        default=0,
    )


def _norm_bytes(features: _AdapterFeatures, shape: ActivationShape) -> int:
    """Return the bytes of the norms of DoRA's rows, and of the factors that they give."""
    experts = shape.model.moe.num_experts // shape.parallel.ep
    rows = features.rescaled + features.rescaled_stream + experts * features.rescaled_experts
    return rows * (shape.wide + shape.element)


@lru_cache(maxsize=64)
def _adapter_features(
    model: ModelSection, *, has_experts: bool, tp: int
) -> tuple[_AdapterFeatures, ...]:
    """Return the adapters of each kind of block with, or without, experts."""
    if not model.lora.r:
        return ()
    found = set()
    for layer in range(model.num_layers + model.num_nextn_predict_layers):
        if model.holds_experts(layer) != has_experts:
            continue
        tensors = layer_tensors(model, layer)
        factors = [each for each in tensors if each.name.endswith(LORA_A)]
        norms = [each for each in tensors if each.name.endswith(MAGNITUDE)]
        rows_here = {each.name: each.box(tp=tp, tp_rank=0).shape[-1] for each in norms}
        linear = [each for each in factors if not each.is_expert]
        rows = [each.shape[-1] // tp for each in linear if each.tp_dim == 1]
        columns = [each.shape[-1] for each in linear if each.tp_dim != 1]
        found.add(
            _AdapterFeatures(
                layers=len(linear),
                expert_layers=len(factors) - len(linear),
                stream=sum(columns),
                inner=sum(rows),
                rescaled=sum(rows_here[each.name] for each in norms if each.tp_dim == 0),
                rescaled_stream=sum(
                    rows_here[each.name] for each in norms if each.tp_dim < 0 and not each.is_expert
                ),
                rescaled_experts=sum(rows_here[each.name] for each in norms if each.is_expert),
            )
        )
    return tuple(found)
