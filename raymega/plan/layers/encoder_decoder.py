"""Define the blocks and tensors of encoder-decoder families (T5, Raffel et al. 2020), and the tokens that each side reads.

Blocks are numbered through both sides: the encoder's first, then the decoder's, as the pipeline runs them.
"""

from __future__ import annotations

from collections.abc import Iterator

from raymega.config.encoder import SpanCorruptionSection
from raymega.config.schema import ModelSection
from raymega.plan.layers.family_parts import parts_of
from raymega.plan.layers.global_tensor import GlobalTensor, Role
from raymega.plan.layers.norm_tensors import norm_tensors

SIDES = ("encoder", "decoder")


def is_decoder_layer(model: ModelSection, layer: int) -> bool:
    """Return whether block ``layer`` is of the decoder, which attends to the encoder's output."""
    return layer >= model.encoder_decoder.num_encoder_layers


def side_lengths(model: ModelSection, seq_len: float) -> tuple[float, float]:
    """Return the tokens of a row that the encoder reads, and those that the decoder reads."""
    decoder = model.encoder_decoder.decoder_seq_len
    return seq_len - decoder, decoder


def table_rows(model: ModelSection, *, tp: int, micro_batch_size: int) -> int:
    """Return the rows [B, D] that tables of relative positions take up in the activations between stages.

    A stage hands the tables on with both streams, so that one stage owns them, and their gradient comes back the
    same way.
    """
    numbers = 2 * model.encoder_decoder.relative_attention_num_buckets * model.num_heads // tp
    return -(-numbers // (micro_batch_size * model.hidden_size))


def position_tables(model: ModelSection) -> list[GlobalTensor]:
    """Return the tables of relative positions, [buckets, H] each, which tp cuts by heads."""
    shape = (model.encoder_decoder.relative_attention_num_buckets, model.num_heads)
    std = model.hidden_size**-0.5
    return [
        _matrix(f"embedding.{side}_positions", shape, 1, std, role="embedding") for side in SIDES
    ]


def block_tensors(model: ModelSection, layer: int) -> Iterator[GlobalTensor]:
    """Yield the tensors of block ``layer``, with T5's initial values: attention has no factor on its scores."""
    at, is_decoder = f"layers.{layer}", is_decoder_layer(model, layer)
    yield from norm_tensors(f"{at}.attention_norm", model)
    yield from _attention(f"{at}.attention", model)
    if is_decoder:
        yield from norm_tensors(f"{at}.cross_attention_norm", model)
        yield from _attention(f"{at}.cross_attention", model)
    # feed-forward layer
    yield from norm_tensors(f"{at}.mlp_norm", model)
    width, inner = model.hidden_size, model.ffn_hidden_size
    for name in ("gate", "up") if parts_of(model).has_gate else ("up",):
        yield _matrix(f"{at}.mlp.{name}", (inner, width), 0, width**-0.5)
    yield _matrix(f"{at}.mlp.down", (width, inner), 1, inner**-0.5)
    if layer + 1 == model.encoder_decoder.num_encoder_layers:
        yield from norm_tensors(f"{at}.encoder_norm", model)


def _attention(at: str, model: ModelSection) -> Iterator[GlobalTensor]:
    width, heads = model.hidden_size, model.num_heads * model.head_width
    stds = {"q": (width * model.head_width) ** -0.5, "k": width**-0.5, "v": width**-0.5}
    for name, std in stds.items():
        yield _matrix(f"{at}.{name}", (heads, width), 0, std)
    yield _matrix(f"{at}.out", (width, heads), 1, heads**-0.5)


def _matrix(
    name: str, shape: tuple[int, int], tp_dim: int, std: float, role: Role = "matrix"
) -> GlobalTensor:
    return GlobalTensor(
        name=f"{name}.weight",
        shape=shape,
        tp_dim=tp_dim,
        init="normal",
        initializer_range=std,
        role=role,
    )


def num_noise(section: SpanCorruptionSection, length: int) -> tuple[int, int]:
    """Return the tokens of a text of ``length`` that are predicted, and in how many spans, as T5 counts them."""
    noise = min(max(round(length * section.noise_density), 1), length - 1)
    spans = max(round(noise / section.mean_span_length), 1)
    return noise, min(spans, noise, length - noise, section.num_sentinels)


def corrupted_lengths(section: SpanCorruptionSection, length: int) -> tuple[int, int]:
    """Return the tokens that encoder and decoder read of a text of ``length``, ends included.

    They are exact with spans of segments. With geometric ones they are the encoder's most, and the decoder's least.
    """
    if section.span_lengths == "geometric":
        return length + 1, 3
    noise, spans = num_noise(section, length)
    return length - noise + spans + 1, noise + spans + 1


def raw_length(section: SpanCorruptionSection, encoder: int, decoder: int) -> int:
    """Return the most tokens of text that fit into a row of ``encoder`` and ``decoder`` tokens; 0 if 2 do not."""
    length = 1
    while all(
        size <= room
        for size, room in zip(
            corrupted_lengths(section, length + 1), (encoder, decoder), strict=True
        )
    ):
        length += 1
    return length if length > 1 else 0
