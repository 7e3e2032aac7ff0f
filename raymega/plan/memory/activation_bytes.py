"""Compute the bytes of activations that a rank keeps for backward, by part of the model.

The formulas are the published ones (Korthikanti et al., Reducing activation recomputation in large
transformer models, 2022) with what they leave out: norm statistics, the log-sum-exp of fused
attention, grouped heads, gated feed-forward layers, number formats. Memory that exists only while a
kernel runs is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from raymega.config.schema import Job, MemorySection, ModelSection, ParallelSection
from raymega.plan.cp_layout import inner_ranks
from raymega.plan.expert_capacity import reserved_rows
from raymega.plan.fp8_layers import NONE_IN_EIGHT, Fp8Coverage, fp8_blocks, fp8_coverage
from raymega.plan.memory.state_bytes import DTYPE_BYTES
from raymega.plan.stages import Stage
from raymega.plan.tensor_table import FAMILY_TENSORS, FamilyTensors, embedding_tensors
from raymega.schedule.instructions import Op, Schedule

MASK_BYTES = 1
"""Bytes of one element in a dropout mask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationShape:
    """Sizes and options that decide the bytes of one micro-batch on one rank, except for its stage.

    ``is_fused`` says that kernels between products read and write each tensor once; what is kept is
    the same. ``fp8_coverage`` has the products that blocks run in fp8, ``fp8_blocks`` the blocks
    that do; None means all. ``has_working_memory`` is False for other systems: what their kernels hold,
    and whether their routers copy their input, is not known.
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
    has_working_memory: bool = True

    @property
    def family(self) -> FamilyTensors:
        """Tensors that layers of the model's family have."""
        return FAMILY_TENSORS[self.model.family]

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
        first = self.model.num_layers
        return range(first, first + (self.model.num_nextn_predict_layers if stage.is_last else 0))

    def blocks_with_experts(self, stage: Stage) -> int:
        """Return how many blocks of the stage have experts instead of a feed-forward layer."""
        moe = self.model.moe
        if not moe.num_experts:
            return 0
        return sum(map(moe.holds_experts, (*stage.layers, *self.further(stage))))

    def kept_wide(self, stage: Stage) -> tuple[int, int]:
        """Return how many (dense, expert) blocks of the stage run no fp8 where others do."""
        if self.fp8_blocks is None:
            return 0, 0
        numbers = (*stage.layers, *self.further(stage))
        kept = [number for number in numbers if number not in self.fp8_blocks]
        with_experts = sum(map(self.model.moe.holds_experts, kept))
        return len(kept) - with_experts, with_experts

    def remakes(self, part: str) -> bool:
        """Return whether backward recomputes this part of every layer."""
        return self.memory.recompute == "selective" and part in self.memory.recompute_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class StageActivations:
    """Bytes of activations that one rank keeps.

    Attributes:
        micro_batch_bytes: Bytes of each micro-batch between its forward and its backward.
        rerun_bytes: Additional bytes while backward recomputes some blocks, and those of up to two
            units that offload has on the device; 0 without either.
        host_bytes: Bytes of each micro-batch in host memory.
    """

    micro_batch_bytes: int
    rerun_bytes: int
    host_bytes: int = 0


def peak_bytes(
    schedule: Schedule,
    chunks: Sequence[StageActivations],
    *,
    wgrad_activation_fraction: float = 1.0,
) -> int:
    """Return the most bytes that a rank holds while it runs ``schedule`` on its ``chunks``.

    Args:
        schedule: Instruction list of the rank.
        chunks: Activations that each of its chunks keeps.
        wgrad_activation_fraction: Share of these that is kept between input and weight gradients of
            a split backward.
    """
    # What each instruction adds to the bytes that are kept.
    share = {
        Op.FORWARD: 1.0,
        Op.BACKWARD: -1.0,
        Op.BACKWARD_INPUT: wgrad_activation_fraction - 1.0,
        Op.BACKWARD_WEIGHT: -wgrad_activation_fraction,
    }
    changes = (share.get(task.op, 0.0) * chunks[task.chunk].micro_batch_bytes for task in schedule)
    return round(max(accumulate(changes))) + max(chunk.rerun_bytes for chunk in chunks)


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
        is_fused=job.run.kernels == "compile",
        fp8_blocks=None
        if job.precision.fp8 == "none"
        else fp8_blocks(job.model.num_layers, job.precision),
    )


def stage_activations(shape: ActivationShape, stage: Stage) -> StageActivations:
    """Return the activations that a rank of ``stage`` keeps."""
    further = len(shape.further(stage))
    # Embedding, and head with multi-token prediction.
    ends = (embedding_bytes(shape) if stage.is_first else 0) + (
        head_bytes(shape) + further * further_bytes(shape) if stage.is_last else 0
    )
    # Blocks of each kind.
    with_experts = shape.blocks_with_experts(stage)
    dense, experts = layer_bytes(shape), layer_bytes(shape, has_experts=True)
    blocks = (stage.num_layers + further - with_experts) * dense + with_experts * experts
    unit = max(dense, experts if with_experts else 0)
    # Full recompute keeps the inputs of groups of blocks alone.
    if shape.memory.recompute != "full":
        kept, rerun = blocks, 0
    else:
        together = min(shape.memory.recompute_every, max(stage.num_layers, min(further, 1)))
        inputs = ceil(stage.num_layers / together) + further if together else 0
        kept, rerun, unit = inputs * shape.stream_bytes, together * unit, shape.stream_bytes
    # Offload leaves two units at a time on the device.
    if "activations" not in shape.memory.offload or not stage.num_layers:
        return StageActivations(micro_batch_bytes=kept + ends, rerun_bytes=rerun)
    mine = further * unit  # blocks that predict further ahead stay
    away = kept - mine
    return StageActivations(
        micro_batch_bytes=mine + ends, rerun_bytes=rerun + min(away, 2 * unit), host_bytes=away
    )


def layer_bytes(shape: ActivationShape, *, has_experts: bool = False) -> int:
    """Return the bytes of one block, without the parts that selective recompute runs again."""
    inner = feed_forward_bytes(shape, has_experts=has_experts)
    return _norm_bytes(shape) + _attention_bytes(shape) + inner


def feed_forward_bytes(shape: ActivationShape, *, has_experts: bool) -> int:
    """Return the bytes of a block's second half: a norm, and a feed-forward layer or experts."""
    if not has_experts:
        return _norm_bytes(shape) + _mlp_bytes(shape)
    # Experts keep rows of their own, and the router a wide copy: the norm's output is freed.
    is_read = not _router_input_bytes(shape) or shape.model.moe.shared_expert_intermediate_size
    unread = 0 if is_read or shape.remakes("norm") else shape.stream_bytes
    return _norm_bytes(shape) - unread + expert_bytes(shape)


def attention_weight_bytes(shape: ActivationShape) -> int:
    """Return the bytes of the [S, S] softmax of all heads here, its dropout mask and the product.

    They are 5 as^2b / t in bf16.
    """
    rows = shape.model.num_heads // shape.parallel.tp * shape.tokens
    return rows * shape.seq_len * (2 * shape.element + MASK_BYTES)


def embedding_bytes(shape: ActivationShape) -> int:
    """Return the bytes of the embedding: its dropout mask and, under tp, two numbers a token.

    The numbers say whether the token is on another rank, and in which row.
    """
    is_elsewhere, row = 1, 8
    cut = shape.tokens * (is_elsewhere + row) if shape.parallel.tp > 1 else 0
    return _residual_mask_bytes(shape) + cut


def head_bytes(shape: ActivationShape) -> int:
    """Return the bytes of the final norm, the projection's input, the logits and the loss.

    The loss keeps three numbers a token.
    """
    label, is_elsewhere = 8, 1
    logits = shape.tokens * vocabulary_rows(shape) * shape.element
    loss = shape.tokens * (shape.wide + label + is_elsewhere)
    return 2 * shape.stream_bytes + _statistics_bytes(shape) + logits + loss


def vocabulary_rows(shape: ActivationShape) -> int:
    """Return the rows of the vocabulary that a rank holds, padded ones included."""
    return embedding_tensors(shape.model)[0].shape[0] // shape.parallel.tp


def further_bytes(shape: ActivationShape) -> int:
    """Return the bytes of one depth of multi-token prediction without its block.

    They are the token's row, the inputs of the projection that joins it, and a head.
    """
    row, is_elsewhere = 8, 1 if shape.parallel.tp > 1 else 0
    joined = 3 * shape.stream_bytes + 2 * _statistics_bytes(shape)
    return joined + shape.tokens * (row + is_elsewhere) + head_bytes(shape)


def _norm_bytes(shape: ActivationShape) -> int:
    """Return the bytes of a norm's input, statistics, and output, which is the next layer's input."""
    output = 0 if shape.remakes("norm") else shape.stream_bytes
    return shape.stream_bytes + output + _statistics_bytes(shape, is_remade=not output)


def _statistics_bytes(shape: ActivationShape, *, is_remade: bool = False) -> int:
    if is_remade:
        return 0
    per_token = 2 if shape.family.has_norm_bias else 1  # mean and deviation, or deviation
    return shape.stream_tokens * per_token * shape.wide


def _attention_bytes(shape: ActivationShape) -> int:
    """Return the bytes that attention keeps.

    They are q, k and v; the weights or, fused, a number a row; the output, which is the next input.
    """
    if shape.model.mla.kv_lora_rank:
        return _latent_attention_bytes(shape)
    model, tp = shape.model, shape.parallel.tp
    heads, kv_heads = model.num_heads // tp, max(1, model.kv_heads // tp)
    qkv = shape.tokens * (heads + 2 * kv_heads) * model.head_width * shape.element
    if shape.remakes("attention"):
        return qkv + _residual_mask_bytes(shape)
    if shape.family.has_head_norms:  # q and k before and after, and a number a head
        features = model.head_width * shape.element + shape.wide
        qkv += shape.tokens * (heads + kv_heads) * features
    output = shape.tokens * heads * model.head_width * shape.element
    inner = inner_ranks(shape.parallel) if shape.parallel.cp > 1 else 1
    if inner > 1:  # kept before heads are exchanged back, too; shared key heads are copied
        copied = max(0, inner - kv_heads)
        qkv += 2 * shape.tokens * copied * model.head_width * shape.element
        output *= 2
    # Fused attention keeps the log-sum-exp of each row.
    fused = shape.tokens * heads * shape.wide
    weights = attention_weight_bytes(shape) if model.attention_dropout else fused
    return qkv + output + weights + _residual_mask_bytes(shape)


def _latent_attention_bytes(shape: ActivationShape) -> int:
    """Return the bytes that latent attention keeps.

    They are latents before and after their norms; q, k and v as wide as k; and the output, as wide
    as k and as wide as v.
    """
    mla, parallel, element = shape.model.mla, shape.parallel, shape.element
    ranks = mla.q_lora_rank + mla.kv_lora_rank
    latents = (2 * ranks + mla.qk_rope_head_dim) * element + (
        2 if mla.q_lora_rank else 1
    ) * shape.wide
    kept = shape.stream_tokens * latents + _residual_mask_bytes(shape)
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


def _mlp_bytes(shape: ActivationShape) -> int:
    """Return the bytes of a dense feed-forward layer."""
    return _inner_bytes(shape, shape.model.ffn_hidden_size) + _residual_mask_bytes(shape)


def _inner_bytes(shape: ActivationShape, width: int) -> int:
    """Return the bytes of the nonlinearity's inputs (gate and up in gated families) and its output."""
    hidden = shape.tokens * width // shape.parallel.tp * shape.element
    read = hidden * (2 if shape.family.has_gate else 1)
    made = 0 if shape.remakes("activation") else hidden
    return read + made


def own_choices(shape: ActivationShape) -> float:
    """Return the rows that a rank sends to experts: its share of the tokens, times top_k.

    With a capacity every expert drops what is above its share. With padding it computes what is
    reserved.
    """
    moe, parallel = shape.model.moe, shape.parallel
    if moe.pad_expert_input_to_capacity:
        num_tokens, num_ranks = shape.tokens // parallel.tp, parallel.tp * parallel.cp
        return moe.num_experts * reserved_rows(moe, num_tokens=num_tokens, num_ranks=num_ranks)
    choices = shape.tokens / parallel.tp * moe.top_k
    return choices * min(1.0, moe.capacity_factor or 1.0)


def expert_rows(shape: ActivationShape) -> float:
    """Return the rows that a rank's experts process under an even load: those of all etp ranks."""
    return own_choices(shape) * shape.parallel.etp


def expert_bytes(shape: ActivationShape) -> int:
    """Return the bytes that experts keep.

    They are the router's scores and its input in its own format, rows as they arrive and as they are
    returned, and what is between.
    The shared expert keeps what any feed-forward layer does.
    """
    model, element, moe = shape.model, shape.element, shape.model.moe
    tokens = shape.tokens // shape.parallel.tp
    router = tokens * (2 * moe.num_experts + 2 * moe.top_k) * shape.wide
    router += _router_input_bytes(shape)
    rows, width = round(expert_rows(shape)), model.hidden_size
    features = model.expert_width // shape.parallel.etp * (2 if shape.family.has_gate else 1)
    made = 0 if shape.remakes("activation") else model.expert_width // shape.parallel.etp
    inner = rows * (width + features + made) * element
    returned = round(own_choices(shape)) * width * element
    places = round(own_choices(shape)) * 4 * 8
    shared = (
        _inner_bytes(shape, moe.shared_expert_intermediate_size)
        if moe.shared_expert_intermediate_size
        else 0
    )
    return router + inner + returned + places + shared + _residual_mask_bytes(shape)


def _router_input_bytes(shape: ActivationShape) -> int:
    """Return the bytes of the router's copy of its input in its own format; 0 where that is the input's."""
    own = DTYPE_BYTES[shape.model.moe.router_dtype]
    if own <= shape.element or not shape.has_working_memory:
        return 0
    return shape.tokens // shape.parallel.tp * shape.model.hidden_size * own


def _residual_mask_bytes(shape: ActivationShape) -> int:
    if not shape.model.hidden_dropout:
        return 0
    return shape.stream_tokens * shape.model.hidden_size * MASK_BYTES
