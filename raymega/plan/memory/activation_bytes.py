"""Compute the bytes of activations that a rank keeps for backward, by part of the model.

The formulas are the published ones (Korthikanti et al., Reducing activation recomputation in large
transformer models, 2022) with what they leave out: norm statistics, the log-sum-exp of fused
attention, grouped heads, gated feed-forward layers, number formats. Memory that exists only while a
kernel runs is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil

from raymega.plan.expert_capacity import reserved_rows
from raymega.plan.layers.encoder_decoder import is_decoder_layer, side_lengths
from raymega.plan.layers.layer_pattern import ALONE, STATES
from raymega.plan.memory.activation_shape import MASK_BYTES, ActivationShape
from raymega.plan.memory.adapter_bytes import adapter_bytes
from raymega.plan.memory.attention_bytes import (
    attention_weight_bytes,
    full_attention_bytes,
    latent_attention_bytes,
)
from raymega.plan.memory.image_bytes import image_bytes
from raymega.plan.memory.linear_attention_bytes import linear_bytes, residual_mask_bytes
from raymega.plan.memory.state_bytes import DTYPE_BYTES
from raymega.plan.stages import Stage
from raymega.plan.tensor_table import embedding_tensors
from raymega.schedule.instructions import Op, Schedule


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


def stage_activations(shape: ActivationShape, stage: Stage) -> StageActivations:
    """Return the activations that a rank of ``stage`` keeps."""
    further = len(shape.further(stage))
    # Embedding, and head with multi-token prediction.
    ends = (embedding_bytes(shape) if stage.is_first else 0) + (
        head_bytes(shape) + further * further_bytes(shape) if stage.is_last else 0
    )
    # Blocks of each kind.
    each_kind = _block_bytes(shape, (*stage.layers, *shape.further(stage)))
    blocks = sum(number * size for number, size in each_kind)
    unit = max((size for _, size in each_kind), default=0)
    if shape.family.is_encoder_decoder:
        each = [stream_layer_bytes(shape, layer) for layer in stage.layers]
        blocks, unit = sum(each), max(each, default=0)
        ends += _shared_bytes(shape, stage)
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


def bytes_to_first_wait(shape: ActivationShape, stage: Stage) -> int:
    """Return the bytes of a forward up to the end of its first block with experts, where two passes take turns."""
    holds_experts = shape.model.holds_experts
    numbers = (*stage.layers, *shape.further(stage))
    first = next((n for n, number in enumerate(numbers) if holds_experts(number)), len(numbers))
    embedding = embedding_bytes(shape) if stage.is_first else 0
    until = sum(number * size for number, size in _block_bytes(shape, numbers[: first + 1]))
    # a stage without experts waits at its neighbour's first ones
    return (
        embedding + until + (layer_bytes(shape, has_experts=True) if first == len(numbers) else 0)
    )


def layer_bytes(shape: ActivationShape, *, has_experts: bool = False) -> int:
    """Return the bytes of one block with or without experts, a mean over those of the model."""
    numbers = range(shape.model.num_layers + shape.model.num_nextn_predict_layers)
    alike = [n for n in numbers if shape.model.holds_experts(n) == has_experts]
    each_kind = (
        _block_bytes(shape, alike) if alike else [(1, _layer_bytes(shape, shape, has_experts))]
    )
    return round(sum(n * size for n, size in each_kind) / sum(n for n, _ in each_kind))


def _block_bytes(shape: ActivationShape, numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the number of blocks of each kind among ``numbers``, and the bytes of one."""
    return [
        (count, _layer_bytes(shape, own, has_experts))
        for count, own, has_experts in shape.blocks(numbers)
    ]


def _layer_bytes(shape: ActivationShape, own: ActivationShape, has_experts: bool) -> int:  # noqa: FBT001  # of blocks()
    """Return the bytes of one block of shape ``own``, without the parts that selective recompute runs again.

    Adapters are those of ``shape``, the whole model, whose patterns have numbers of layers.
    """
    rows = round(expert_rows(shape)) if has_experts else 0
    adapted = adapter_bytes(shape, has_experts=has_experts, num_expert_rows=rows)
    shape = own
    inner = feed_forward_bytes(shape, has_experts=has_experts)
    # A feed-forward layer beside attention reads the same input, counted once.
    shared = shape.stream_bytes if shape.family.is_parallel else 0
    if shape.family.has_one_part and shape.model.attention.layer_types[0] in ALONE:
        return inner + adapted
    mixer = _norm_bytes(shape) + _attention_bytes(shape)
    if shape.family.has_one_part:
        return mixer + adapted
    return mixer + inner - shared + adapted


def feed_forward_bytes(shape: ActivationShape, *, has_experts: bool) -> int:
    """Return the bytes of a block's second half: a norm, and a feed-forward layer or experts."""
    if not has_experts:
        return _norm_bytes(shape) + _mlp_bytes(shape)
    # Experts keep rows of their own, and the router a wide copy: the norm's output is freed.
    moe = shape.model.moe
    is_read = not _router_input_bytes(shape) or moe.shared_expert_intermediate_size
    is_read = is_read or moe.apply_probs_on_input
    is_made = shape.family.norms != "after" and not shape.remakes("norm")
    unread = shape.stream_bytes if is_made and not is_read else 0
    return _norm_bytes(shape) - unread + expert_bytes(shape)


def stream_layer_bytes(shape: ActivationShape, layer: int) -> int:
    """Return the bytes of block ``layer`` of an encoder-decoder model, which keeps the weights of all its scores.

    Keys and values are those of all context-parallel ranks.
    """
    encoder, decoder = (
        replace(shape, seq_len=round(n)) for n in side_lengths(shape.model, shape.seq_len)
    )
    is_decoder = is_decoder_layer(shape.model, layer)
    own = decoder if is_decoder else encoder
    kept = layer_bytes(own) + _score_bytes(own, own)
    if not is_decoder:
        is_end = layer + 1 == shape.model.encoder_decoder.num_encoder_layers
        return kept + (residual_mask_bytes(own) if is_end else 0)
    # attention to the encoder: a norm, and attention with other keys
    rows = shape.model.num_heads // shape.parallel.tp * shape.model.head_width * shape.element
    heads = rows * (decoder.tokens if shape.remakes("attention") else 2 * decoder.tokens)
    heads += 2 * rows * encoder.tokens
    fused = shape.model.num_heads // shape.parallel.tp * decoder.tokens * shape.wide
    is_remade = shape.remakes("attention")
    return (
        kept
        + _norm_bytes(decoder)
        + residual_mask_bytes(decoder)
        + heads
        + (0 if is_remade else fused)
        + _score_bytes(decoder, encoder)
    )


def _shared_bytes(shape: ActivationShape, stage: Stage) -> int:
    """Return what the blocks of a stage share: buckets of pairs of positions, and the encoder's normalised output.

    Rows that are not packed share one entry of buckets.
    """
    bucket_and_mask, last = 8 + 1, shape.model.encoder_decoder.num_encoder_layers - 1
    kinds, kept = {is_decoder_layer(shape.model, layer) for layer in stage.layers}, 0
    for is_decoder, length in enumerate(side_lengths(shape.model, shape.seq_len)):
        side = replace(shape, seq_len=round(length))
        if is_decoder in kinds:
            kept += bucket_and_mask * side.seq_len**2 // side.parallel.cp
        if not is_decoder and last in stage.layers:
            kept += side.stream_bytes + _statistics_bytes(side)
        if not is_decoder and True in kinds:
            kept += side.stream_bytes
    return kept


def _score_bytes(queries: ActivationShape, keys: ActivationShape) -> int:
    """Return what attention with a bias keeps beyond a fused kernel: all weights, and other ranks' keys and values."""
    if queries.remakes("attention"):
        return 0
    heads = queries.model.num_heads // queries.parallel.tp
    weights = heads * queries.tokens * (keys.seq_len * queries.element - queries.wide)
    if queries.model.attention_dropout:
        # weights before dropout, their mask, and the product's; a stream's own are in its layer's bytes
        each = 2 * queries.element + MASK_BYTES
        weights = heads * queries.tokens * (keys.seq_len * each - queries.wide)
        weights -= 0 if queries is not keys else attention_weight_bytes(queries)
    elsewhere = (keys.parallel.cp - 1) * keys.tokens * heads * keys.model.head_width
    return weights + 2 * elsewhere * keys.element


def embedding_bytes(shape: ActivationShape) -> int:
    """Return the bytes of the embedding: its dropout mask, an encoder's norm and, under tp, two numbers a token.

    The numbers say whether the token is on another rank, and in which row; a frozen table needs none.
    """
    is_elsewhere, row = 1, 8
    is_read = shape.parallel.tp > 1 and not embedding_tensors(shape.model)[0].is_frozen
    cut = shape.tokens * (is_elsewhere + row) if is_read else 0
    has_norm = shape.family.has_embedding_norm
    norm = (shape.stream_bytes + _statistics_bytes(shape)) * has_norm
    return residual_mask_bytes(shape) + cut + norm + image_bytes(shape)


def head_bytes(shape: ActivationShape) -> int:
    """Return the bytes of the final norm, the projection's input, the logits and the loss.

    Capped logits are kept before they are scaled, too. The loss keeps three numbers a token.
    """
    shape = head_shape(shape)
    label, is_elsewhere = 8, 1
    copies = 2 if shape.model.multipliers.logit_softcap else 1
    logits = shape.tokens * vocabulary_rows(shape) * shape.element * copies
    loss = shape.tokens * (shape.wide + label + is_elsewhere)
    norm = shape.stream_bytes + _statistics_bytes(shape)
    mask = residual_mask_bytes(shape) if shape.family.is_encoder_decoder else 0
    # an encoder's transform has inputs of its product and of GELU, and a norm
    transform = (
        0 if shape.family.is_causal or shape.model.head.is_on else 2 * shape.stream_bytes + norm
    )
    final_norm = 0 if shape.family.norms == "sum" else norm
    return final_norm + mask + transform + shape.stream_bytes + logits + loss


def head_shape(shape: ActivationShape) -> ActivationShape:
    """Return the shape of what the head reads: of an encoder-decoder model the decoder's tokens alone."""
    if not shape.family.is_encoder_decoder:
        return shape
    return replace(shape, seq_len=round(side_lengths(shape.model, shape.seq_len)[1]))


def vocabulary_rows(shape: ActivationShape) -> int:
    """Return the rows of the vocabulary that a rank holds, padded ones included, or scores of a head without one."""
    if shape.model.head.is_on:
        return shape.model.head.num_scores
    return embedding_tensors(shape.model)[0].shape[0] // shape.parallel.tp


def further_bytes(shape: ActivationShape) -> int:
    """Return the bytes of one depth of multi-token prediction without its block.

    They are the token's row, the inputs of the projection that joins it, and a head.
    """
    row, is_elsewhere = 8, 1 if shape.parallel.tp > 1 else 0
    joined = 3 * shape.stream_bytes + 2 * _statistics_bytes(shape)
    return joined + shape.tokens * (row + is_elsewhere) + head_bytes(shape)


def _norm_bytes(shape: ActivationShape) -> int:
    """Return the bytes that a part's norms keep: inputs, statistics, and the input of the part.

    A norm before the part has its input and output, which is the part's input. After the part it has
    its input alone, for the sum with the residual stream keeps nothing; the part then reads the stream.
    """
    is_remade = shape.remakes("norm")
    kept = 0 if is_remade else shape.family.norm_kind.kept
    each = (1 + kept) * shape.stream_bytes + _statistics_bytes(shape, is_remade=is_remade)
    match shape.family.norms:
        case "after" | "sum":
            return shape.stream_bytes + each
        case "both":
            return 2 * each + (0 if is_remade else shape.stream_bytes)
        case "before":
            return each + (0 if is_remade else shape.stream_bytes)


def _statistics_bytes(shape: ActivationShape, *, is_remade: bool = False) -> int:
    if is_remade:
        return 0
    return shape.stream_tokens * shape.family.norm_kind.statistics * shape.wide


def _attention_bytes(shape: ActivationShape) -> int:
    """Return the bytes that attention keeps, or a state in its place, in the model's one kind of layer."""
    if shape.model.attention.layer_types[0] in STATES:
        return linear_bytes(shape)
    return (latent_attention_bytes if shape.model.mla.kv_lora_rank else full_attention_bytes)(shape)


def _mlp_bytes(shape: ActivationShape) -> int:
    """Return the bytes of a dense feed-forward layer.

    SwiGLU is one function, which makes silu(gate) again; other gates keep theirs for the product with up.
    """
    family, width = shape.family, shape.model.ffn_hidden_size
    is_kept = (
        family.has_gate and "silu" not in family.activation and not shape.remakes("activation")
    )
    gate = shape.tokens * width // shape.parallel.tp * shape.element if is_kept else 0
    # ReLU's backward reads its result, which the next product keeps
    is_one = family.activation == "relu" and not family.has_gate and not shape.remakes("activation")
    result = shape.tokens * width // shape.parallel.tp * shape.element if is_one else 0
    return _inner_bytes(shape, width) + gate - result + residual_mask_bytes(shape)


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
    return router + inner + returned + places + shared + residual_mask_bytes(shape)


def _router_input_bytes(shape: ActivationShape) -> int:
    """Return the bytes of the router's copy of its input in its own format; 0 where that is the input's."""
    own = DTYPE_BYTES[shape.model.moe.router_dtype]
    if own <= shape.element or not shape.has_working_memory:
        return 0
    return shape.tokens // shape.parallel.tp * shape.model.hidden_size * own
