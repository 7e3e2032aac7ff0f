"""Times of each kind of block that a model has, and of those of a stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from raymega.plan.flops import plain_layers
from raymega.plan.fp8_layers import NONE_IN_EIGHT
from raymega.plan.hardware.catalog import Accelerator
from raymega.plan.layers.layer_pattern import (
    LayerKind,
    has_unlike_layers,
    layer_kind,
    one_layer,
)
from raymega.plan.memory.activation_shape import ActivationShape
from raymega.plan.stages import Stage
from raymega.planner.cost.layer_time import LayerTime, layer_time
from raymega.planner.cost.linear_attention_time import mean_over_blocks, time_of_kind
from raymega.planner.kernels.system_traits import Software


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTimes:
    """Times of a block of each kind; in a model with one kind both are the same.

    ``dense`` and ``experts`` are means over the model's blocks. ``wide`` has the times of blocks that run no product
    in fp8, where others do. ``kinds`` are those of each kind of block where sizes or kinds of attention differ by
    layer; else empty.
    """

    dense: LayerTime
    experts: LayerTime
    wide: BlockTimes | None = None
    kinds: Mapping[LayerKind, LayerTime] = field(default_factory=dict)

    def of_stage(self, shape: ActivationShape, stage: Stage) -> Iterator[tuple[float, LayerTime]]:
        """Yield the number of the stage's blocks of each kind, with the time of one.

        Blocks of multi-token prediction count as blocks. Those of encoder and decoder count as plain blocks, by
        their FLOPs.
        """
        if shape.family.is_encoder_decoder:
            for block, layers in self._sides(shape, stage):
                yield plain_layers(shape.model, layers, seq_len=shape.seq_len), block
            return
        # sizes often grow with the layer, and states cost another time than attention: no mean is any stage's
        if self.kinds:
            numbers = (*stage.layers, *shape.further(stage))
            for kind, count in Counter(self._kind(shape, number) for number in numbers).items():
                yield count, kind
            return
        with_experts = shape.blocks_with_experts(stage)
        dense = stage.num_layers + len(shape.further(stage)) - with_experts
        if self.wide is not None:
            kept, kept_experts = shape.kept_wide(stage)
            dense, with_experts = dense - kept, with_experts - kept_experts
            yield from ((kept, self.wide.dense), (kept_experts, self.wide.experts))
        yield from ((dense, self.dense), (with_experts, self.experts))

    def _sides(self, shape: ActivationShape, stage: Stage) -> Iterator[tuple[LayerTime, list[int]]]:
        """Yield the time of a plain block, with the stage's layers that it stands for."""
        if self.wide is None or shape.fp8_blocks is None:
            yield self.dense, list(stage.layers)
            return
        yield self.dense, [layer for layer in stage.layers if layer in shape.fp8_blocks]
        yield self.wide.dense, [layer for layer in stage.layers if layer not in shape.fp8_blocks]

    def _kind(self, shape: ActivationShape, number: int) -> LayerTime:
        """Return the time of block ``number`` where kinds differ."""
        is_wide = shape.fp8_blocks is not None and number not in shape.fp8_blocks
        kinds = self.wide.kinds if self.wide is not None and is_wide else self.kinds
        return kinds[layer_kind(shape.model, number)]


def block_times(shape: ActivationShape, device: Accelerator, software: Software) -> BlockTimes:
    """Return the times of each kind of block that the model has."""
    times, wide = partial(layer_time, device=device, software=software), None
    if shape.fp8_blocks is not None:
        wide = block_times(
            replace(shape, fp8_coverage=NONE_IN_EIGHT, fp8_blocks=None), device, software
        )
    experts = dense = mean_over_blocks(times, shape, has_experts=False)
    if shape.model.moe.num_experts:
        experts = mean_over_blocks(times, shape, has_experts=True)
    kinds = _times_by_kind(times, shape) if has_unlike_layers(shape.model) else {}
    return BlockTimes(dense=dense, experts=experts, wide=wide, kinds=kinds)


def _times_by_kind(
    times: Callable[..., LayerTime], shape: ActivationShape
) -> dict[LayerKind, LayerTime]:
    """Return the times of each kind of block, those of multi-token prediction included."""
    model, found = shape.model, {}
    for number in range(model.num_layers + model.num_nextn_predict_layers):
        kind = layer_kind(model, number)
        if kind not in found:
            own = replace(shape, model=one_layer(model, number))
            found[kind] = time_of_kind(times, own, has_experts=kind[1])
    return found
