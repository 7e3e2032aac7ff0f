"""Count the floating-point operations of a model from its section of the job alone.

They are model FLOPs: what the mathematics needs, whatever is recomputed, padded or masked. Two
systems are then compared by the same count (Chowdhery et al. 2022, PaLM, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from raymega.config.schema import Job, ModelSection
from raymega.plan.distillation.teacher import teacher_job
from raymega.plan.layers.encoder_decoder import is_decoder_layer, side_lengths
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.layers.layer_pattern import (
    DELTA_NET,
    has_unlike_layers,
    layer_kind,
    mean_keys,
    mixer_share,
    one_layer,
    state_kind,
    state_share,
)
from raymega.plan.layers.vision import image_flops
from raymega.plan.tensor_table import (
    embedding_tensors,
    head_tensors,
    is_head_frozen,
    is_tower_frozen,
    layer_tensors,
    like_blocks,
    mtp_tensors,
)
from raymega.schedule.simulate import Durations

FORWARD_AND_BACKWARD = 3
"""FLOPs of both passes over those of the forward. A backward multiplies each matrix twice: for the
gradient of its input and for its own."""


def flops_per_token(model: ModelSection, *, seq_len: float) -> float:
    """Return the FLOPs of training on one token: forward and backward, without gradients of frozen weights."""
    whole = FORWARD_AND_BACKWARD * forward_flops_per_token(model, seq_len=seq_len)
    return whole - _spared_flops(model, seq_len)


def forward_flops_per_token(model: ModelSection, *, seq_len: float) -> float:
    """Return the FLOPs of a forward pass for one token.

    A matrix of n weights costs 2 n a token: those of the blocks, and the head, tied or not. Looking
    up an embedding costs nothing; norms and biases are not counted. Attention's two products cost 2
    * (S / 2) * H * (K + the width of a value head) a token and layer. A causal token sees half of
    the sequence on average. States cost 6 K V a value head in a gated delta net, 4 K V in Mamba-2. Each depth of multi-token prediction costs a block, the matrix before
    it and the head once more.

    Counting the whole [S, S] square, as Narayanan et al. 2021 and PaLM do, doubles attention's
    part. With the half, Llama 3 8B at S=8192 needs 51.5 GFLOP a token, the figure of NVIDIA's
    tables.
    """
    if parts_of(model).is_encoder_decoder:
        # each side has tokens of its own, and only the decoder's meet the head
        _, decoder = side_lengths(model, seq_len)
        forward = sum(layer_flops(model, seq_len)) + decoder * 2 * head_weights(model)
        return forward / seq_len
    # blocks and head; then multi-token prediction
    attention = _attention_flops(model, seq_len)
    head = head_weights(model)
    weights = sum(
        times * active_weights(layer_tensors(model, layer), model)
        for layer, times in like_blocks(model).items()
    )
    forward = 2 * weights + model.num_layers * attention + 2 * head
    forward += 2 * active_weights(mtp_tensors(model), model)
    forward += model.num_nextn_predict_layers * (attention + 2 * head)
    # the tower's work on the images among the tokens, model.vision.image_share of them
    return float(forward + model.vision.images_per_token * image_flops(model, is_mean=True))


def _spared_flops(model: ModelSection, seq_len: float) -> float:
    """Return the FLOPs that a backward is spared for a token: weight gradients, and all of a frozen tower.

    Of encoder-decoder models each side's matrices meet its own tokens.
    """
    if not (model.freeze or model.lora.r):
        return 0.0
    sides, of_head = [1.0, 1.0], 1.0
    if parts_of(model).is_encoder_decoder:
        sides = [length / seq_len for length in side_lengths(model, seq_len)]
        of_head = sides[1]
    frozen = sum(
        times
        * sides[is_decoder_layer(model, layer)]
        * _frozen_weights(layer_tensors(model, layer), model)
        for layer, times in like_blocks(model).items()
    ) + _frozen_weights(mtp_tensors(model), model)
    if is_head_frozen(model):
        frozen += of_head * (1 + model.num_nextn_predict_layers) * head_weights(model)
    tower = (
        model.vision.images_per_token * image_flops(model, is_mean=True) * is_tower_frozen(model)
    )
    return 2 * (frozen + tower)


def _frozen_weights(tensors: Iterable[GlobalTensor], model: ModelSection) -> float:
    return active_weights((each for each in tensors if each.is_frozen), model)


def job_flops_per_token(job: Job, *, seq_len: float) -> float:
    """Return the FLOPs of a run for one token: those of training, and of forward passes by a reference or a teacher.

    A frozen base costs the forward of the model, and kto's estimate of the divergence one more; a live teacher
    costs its own. Stored numbers cost none.
    """
    trained, preference = flops_per_token(job.model, seq_len=seq_len), job.preference
    if job.distillation.is_live:
        return trained + forward_flops_per_token(teacher_job(job).model, seq_len=seq_len)
    is_live = preference.needs_reference and preference.reference == "base"
    passes = is_live + (preference.loss_type == "kto")
    return trained + passes * forward_flops_per_token(job.model, seq_len=seq_len)


def layer_flops(model: ModelSection, seq_len: float) -> list[float]:
    """Return the forward FLOPs of each block of an encoder-decoder model on one row.

    An encoder's token sees all tokens of its side. A decoder's sees half of its own on average, and all of the
    encoder's, of which attention to them makes keys and values.
    """
    encoder, decoder = side_lengths(model, seq_len)
    product = 2 * model.num_heads * model.head_width  # of one pair of tokens
    found = []
    for layer in range(model.num_layers):
        weights = active_weights(layer_tensors(model, layer), model)
        if not is_decoder_layer(model, layer):
            found.append(2 * encoder * weights + 2 * product * encoder**2)
            continue
        read = 2 * model.hidden_size * model.num_heads * model.head_width
        matrices = 2 * decoder * (weights - read) + 2 * encoder * read
        found.append(matrices + product * decoder**2 + 2 * product * decoder * encoder)
    return found


def plain_layers(model: ModelSection, layers: Iterable[int], *, seq_len: float) -> float:
    """Return how many plain blocks on whole rows cost what ``layers`` of an encoder-decoder model cost."""
    flops = layer_flops(model, seq_len)
    weights = active_weights(layer_tensors(model, 0), model)
    plain = seq_len * (2 * weights + _attention_flops(model, seq_len))
    return sum(flops[layer] for layer in layers) / plain


@lru_cache(maxsize=16)
def layer_costs(model: ModelSection, seq_len: float) -> tuple[float, ...]:
    """Return the cost of each block in units of the last one; empty where all blocks cost the same, or are taken to."""
    if parts_of(model).is_encoder_decoder:
        flops = layer_flops(model, seq_len)
    elif has_unlike_layers(model):
        kinds = [layer_kind(model, layer) for layer in range(model.num_layers)]
        # one layer of each kind
        once = {
            kind: 2 * active_weights(layer_tensors(model, layer), model)
            + _attention_flops(one_layer(model, layer), seq_len)
            for kind, layer in dict(zip(kinds, range(model.num_layers), strict=True)).items()
        }
        flops = [once[kind] for kind in kinds]
    else:
        return ()
    return tuple(each / flops[-1] for each in flops)


def head_weights(model: ModelSection) -> int:
    """Return the matrix elements of the head that one token is multiplied with.

    A pooler, and a head of whole documents unless it takes means, see few tokens; they are counted as none.
    """
    if not model.head.is_on:
        return model.vocab_size * model.hidden_size + _transform_weights(model)
    is_of_all = model.head.pooling == "mean" or model.head.kind == "token_classification"
    return model.head.num_scores * model.hidden_size * is_of_all


def active_weights(tensors: Iterable[GlobalTensor], model: ModelSection) -> float:
    """Return the matrix elements that one token is multiplied with; of experts, top_k of all."""
    share = model.moe.top_k / max(1, model.moe.num_experts)
    matrices = (t for t in tensors if len(t.shape) > 1 and t.role != "bias" and not t.is_carried)
    return sum(t.num_elements * (share if t.is_expert else 1.0) for t in matrices)


def trained_share(model: ModelSection) -> float:
    """Return the share of the blocks' weight gradients that are computed: those of frozen weights are not."""
    if not (model.freeze or model.lora.r):
        return 1.0
    trained = whole = 0.0
    for layer, times in like_blocks(model).items():
        tensors = layer_tensors(model, layer)
        trained += times * active_weights((t for t in tensors if t.is_trained), model)
        whole += times * active_weights(tensors, model)
    return trained / whole


def pass_times(model: ModelSection, *, seq_len: int) -> Durations:
    """Return the durations of a layer's passes in units of its forward, by their FLOPs.

    The weight part is that of the matrices alone. The input part has as much, and attention's
    backward, which is twice its forward.
    """
    weights = active_weights(layer_tensors(model, model.num_layers - 1), model)
    matrices, attention = 2 * weights, _attention_flops(model, seq_len)
    return Durations(forward=1.0, backward=2.0, weight=matrices / (matrices + attention))


@lru_cache(maxsize=16)
def loss_cost(model: ModelSection, seq_len: float) -> float:
    """Return the FLOPs of what follows the last layer over those of that layer, scores left out."""
    if parts_of(model).is_encoder_decoder:
        _, decoder = side_lengths(model, seq_len)
        return decoder * 2 * head_weights(model) / layer_flops(model, seq_len)[-1]
    layer = active_weights(layer_tensors(model, model.num_layers - 1), model)
    further = active_weights(mtp_tensors(model), model)
    head = (
        head_weights(model)
        if model.head.is_on
        else embedding_tensors(model)[0].num_elements + _transform_weights(model)
    )
    return ((1 + model.num_nextn_predict_layers) * head + further) / layer


def tower_cost(model: ModelSection) -> float:
    """Return the FLOPs of a vision tower on the images of a mean token over those of the last layer; 0 without one.

    A frozen tower has a forward alone, a third of what a layer has. tp and cp share both out alike.
    """
    if not model.vision.is_on:
        return 0.0
    layer = 2 * active_weights(layer_tensors(model, model.num_layers - 1), model)
    share = 1 / 3 if is_tower_frozen(model) else 1.0
    return share * model.vision.images_per_token * image_flops(model) / layer


def _transform_weights(model: ModelSection) -> int:
    """Return the elements of an encoder's matrix before the head; its pooler is used once a row."""
    named = (t for t in head_tensors(model) if t.name == "head.transform.weight")
    return sum(tensor.num_elements for tensor in named)


def _attention_flops(model: ModelSection, seq_len: float) -> float:
    """Return the FLOPs of attention's two products, or of states, in a forward: one token, a mean layer."""
    if model.layer_sizes.is_on:
        layers = [one_layer(model, layer) for layer in range(model.num_layers)]
        return sum(_attention_flops(each, seq_len) for each in layers) / len(layers)
    keys, share = mean_keys(model, seq_len=seq_len), state_share(model)
    products = keys * model.num_heads * (model.head_width + model.value_width)
    return mixer_share(model) * ((1 - share) * products + share * state_flops(model))


def state_flops(model: ModelSection) -> float:
    """Return the FLOPs of a layer's states in a forward, for one token.

    Each value head's state of K V numbers is added a key times a value, and multiplied by a query; in a
    gated delta net also by a key. Chunked forms need more.
    """
    sizes, products = model.linear_attention, 3 if state_kind(model) == DELTA_NET else 2
    return products * 2 * sizes.num_value_heads * sizes.key_head_dim * sizes.value_head_dim
