"""Define the sizes and options of a job that decide the bytes of activations on a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from raymega.config.schema import Job, MemorySection, ModelSection, ParallelSection
from raymega.plan.fp8_layers import NONE_IN_EIGHT, Fp8Coverage, fp8_blocks, fp8_coverage
from raymega.plan.hardware.kernel_choice import compiles_kernels
from raymega.plan.hardware.tp_overlap import overlaps_messages
from raymega.plan.layers.encoder_decoder import is_decoder_layer
from raymega.plan.layers.family_parts import FamilyParts, parts_of
from raymega.plan.layers.layer_pattern import LayerKind, layer_kind, one_layer
from raymega.plan.memory.state_bytes import DTYPE_BYTES
from raymega.plan.stages import Stage

MASK_BYTES = 1
"""Bytes of one element in a dropout mask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationShape:
    """Sizes and options that decide the bytes of one micro-batch on one rank, except for its stage.

    ``is_fused`` says that kernels between products read and write each tensor once; what is kept is
    the same. ``is_tp_overlapped``: messages over tp overlap products. ``fp8_coverage`` has the products
    in fp8, ``fp8_blocks`` the blocks that have them (None: all). Without ``has_working_memory``, of other
    systems, kernels' memory and routers' copies are not known.
    """

    model: ModelSection
    parallel: ParallelSection
    memory: MemorySection
    seq_len: int
    micro_batch_size: int
    dtype: str
    fp8_coverage: Fp8Coverage = NONE_IN_EIGHT
    fp8_blocks: range | None = None
    is_fused: bool = False
    is_tp_overlapped: bool = False
    has_working_memory: bool = True

    @property
    def family(self) -> FamilyParts:
        """Parts that layers of the model's family have."""
        return parts_of(self.model)

    @property
    def element(self) -> int:
        """Bytes of a number in the compute format."""
        return DTYPE_BYTES[self.dtype]

    @property
    def wide(self) -> int:
        """Bytes of a number in max(fp32, compute format)."""
        return max(4, self.element)

    @property
    def tokens(self) -> int:
        """Number of tokens inside the layers that tp cuts by feature."""
        return self.seq_len * self.micro_batch_size // self.parallel.cp

    @property
    def stream_tokens(self) -> int:
        """Number of tokens of the residual stream between such layers."""
        return self.tokens // (self.parallel.tp if self.parallel.sequence_parallel else 1)

    @property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream; without sp and cp sbh times 2 in bf16."""
        return self.stream_tokens * self.model.hidden_size * self.element

    def further(self, stage: Stage) -> range:
        """Return the numbers of the stage's multi-token prediction blocks, after the model's own."""
        first, count = self.model.num_layers, self.model.num_nextn_predict_layers
        return range(first, first + count * stage.is_last)

    def blocks_with_experts(self, stage: Stage) -> int:
        """Return how many blocks of the stage have experts instead of a feed-forward layer."""
        model, numbers = self.model, (*stage.layers, *self.further(stage))
        return sum(map(model.holds_experts, numbers)) if model.moe.num_experts else 0

    def blocks(self, numbers: Iterable[int]) -> list[tuple[int, ActivationShape, bool]]:
        """Return groups of like blocks among ``numbers``: how many, their shape, and whether they have experts.

        The shape of a group is that of a model with one such block, of which sizes and kinds of layers are read.
        """
        groups: dict[LayerKind, list[int]] = {}
        for number in numbers:
            groups.setdefault(layer_kind(self.model, number), []).append(number)
        # a model of one kind of layer is its own: views of it would only cost time
        if len(groups) == 1 and not self.model.layer_sizes.is_on and len(self._kinds) == 1:
            ((kind, alike),) = groups.items()
            return [(len(alike), self, kind[1])]
        return [
            (len(alike), replace(self, model=one_layer(self.model, alike[0])), kind[1])
            for kind, alike in groups.items()
        ]

    @property
    def _kinds(self) -> tuple[str, ...]:
        return self.model.attention.layer_types

    def sides(self, stage: Stage) -> tuple[int, bool]:
        """Return how many blocks of the stage are a decoder's, and whether the encoder ends there; 0 without sides."""
        if not self.family.is_encoder_decoder:
            return 0, False
        decoder = sum(is_decoder_layer(self.model, layer) for layer in stage.layers)
        return decoder, self.model.encoder_decoder.num_encoder_layers - 1 in stage.layers

    def kept_wide(self, stage: Stage) -> tuple[int, int]:
        """Return how many (dense, expert) blocks of the stage run no fp8 where others do."""
        if self.fp8_blocks is None:
            return 0, 0
        numbers = (*stage.layers, *self.further(stage))
        kept = [number for number in numbers if number not in self.fp8_blocks]
        with_experts = sum(map(self.model.holds_experts, kept))
        return len(kept) - with_experts, with_experts

    def remakes(self, part: str) -> bool:
        """Return whether backward recomputes this part of every layer."""
        return self.memory.recompute == "selective" and part in self.memory.recompute_parts


def activation_shape(job: Job) -> ActivationShape:
    """Return the activation shape of a job."""
    return ActivationShape(
        model=job.model,
        parallel=job.parallel,
        memory=job.memory,
        seq_len=job.data.seq_len,
        micro_batch_size=job.schedule.micro_batch_size,
        dtype=job.precision.dtype,
        fp8_coverage=fp8_coverage(job.precision),
        is_fused=compiles_kernels(job),
        is_tp_overlapped=overlaps_messages(job),
        fp8_blocks=None
        if job.precision.fp8 == "none"
        else fp8_blocks(job.model.num_layers, job.precision),
    )
