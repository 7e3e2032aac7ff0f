"""Check the rules of encoder-decoder families: division of blocks and tokens, spans, and what they do not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from raymega.config.attention import AttentionSection
from raymega.config.data import MEGATRON
from raymega.config.encoder import EncoderDecoderSection, SpanCorruptionSection
from raymega.config.heads.section import HeadSection
from raymega.config.mla import MlaSection
from raymega.config.moe import MoeSection
from raymega.config.schema import EvalTask, LoraSection
from raymega.errors import Fault
from raymega.plan.layers.encoder_decoder import corrupted_lengths, num_noise, raw_length
from raymega.plan.layers.family_parts import FAMILY_PARTS, family_parts
from raymega.plan.validation.rule import broken_rows, reads

ENCODER_DECODERS = ", ".join(name for name, p in FAMILY_PARTS.items() if p.is_encoder_decoder)


@reads("model.family encoder_decoder, data.span_corruption")
def other_family_faults(
    family: str, sides: EncoderDecoderSection, spans: SpanCorruptionSection
) -> Iterator[Fault]:
    """Check that fields of encoder-decoder families are set for these alone."""
    if family_parts(family).is_encoder_decoder:
        return
    for name, section in (("model.encoder_decoder", sides), ("data.span_corruption", spans)):
        plain = type(section)()
        for field, value in section:
            if value != getattr(plain, field):
                yield Fault(
                    fact=f"{name}.{field}={value} with model.family={family}",
                    rule=f"{family} has one stream of tokens, so it has no effect",
                    remedy=f"leave {name}.{field} out, or set model.family to one of {ENCODER_DECODERS}",
                )


@reads("model.family encoder_decoder num_layers")
def side_faults(family: str, sides: EncoderDecoderSection, layers: int) -> Iterator[Fault]:
    """Check that each side has blocks."""
    own = sides.num_encoder_layers
    if family_parts(family).is_encoder_decoder and not 0 < own < layers:
        yield Fault(
            fact=f"model.encoder_decoder.num_encoder_layers={own} with model.family={family}",
            rule=f"model.num_layers={layers} counts both sides, and each has a block or more",
            remedy=f"set model.encoder_decoder.num_encoder_layers={max(1, layers // 2)}, and model.num_layers to "
            "the blocks of both",
        )


@reads("model.family encoder_decoder, data.seq_len")
def length_faults(family: str, sides: EncoderDecoderSection, seq_len: int) -> Iterator[Fault]:
    """Check that each side has tokens."""
    length = sides.decoder_seq_len
    if family_parts(family).is_encoder_decoder and not 0 < length < seq_len:
        yield Fault(
            fact=f"model.encoder_decoder.decoder_seq_len={length} with model.family={family}",
            rule=f"of the data.seq_len={seq_len} tokens of a row each side reads one or more",
            remedy=f"set model.encoder_decoder.decoder_seq_len={max(1, seq_len // 4)}",
        )


@reads("model.family encoder_decoder num_heads num_kv_heads initializer_range")
def table_faults(  # fields of one rule
    family: str,
    sides: EncoderDecoderSection,
    heads: int,
    kv_heads: int | str,
    initializer_range: float,
) -> Iterator[Fault]:
    """Check that the buckets of positions are two halves, and that heads and initial values are T5's."""
    if not family_parts(family).is_encoder_decoder:
        return
    buckets, distance = sides.relative_attention_num_buckets, sides.relative_attention_max_distance
    yield from broken_rows(
        (
            (
                buckets % 4 > 0 or distance <= buckets // 2,
                f"model.encoder_decoder.relative_attention_num_buckets={buckets} and "
                f"relative_attention_max_distance={distance}",
                "half of a direction's buckets are of one distance each, so 4 divides their number, and the largest "
                f"distance is above {buckets // 2}",
                "use 32 and 128, as T5 does",
            ),
            (
                kv_heads not in ("num_heads", heads),
                f"model.num_kv_heads={kv_heads} with model.family={family}",
                "each query head has keys of its own",
                "leave model.num_kv_heads out",
            ),
            (
                initializer_range != 0.02,
                f"model.initializer_range={initializer_range:g} with model.family={family}",
                f"{family} has initial values by the widths of its matrices",
                "leave model.initializer_range out",
            ),
        )
    )


@reads(
    "model.family encoder_decoder vocab_size, data.span_corruption seq_len packing document_multiple path"
)
def span_faults(  # fields of one rule
    family: str,
    sides: EncoderDecoderSection,
    vocab_size: int,
    spans: SpanCorruptionSection,
    seq_len: int,
    packing: str,
    multiple: int,
    path: str,
) -> Iterator[Fault]:
    """Check the ids of spans, and that a row holds what its text becomes."""
    room = seq_len - sides.decoder_seq_len, sides.decoder_seq_len
    if not family_parts(family).is_encoder_decoder or min(room) < 1:
        return
    if spans.num_sentinels > vocab_size:
        yield Fault(
            fact=f"data.span_corruption.num_sentinels={spans.num_sentinels}",
            rule=f"each is one of the model's {vocab_size} tokens",
            remedy=f"set data.span_corruption.num_sentinels={min(100, vocab_size)}",
        )
        return
    last, count = spans.first_sentinel_id, num_noise(spans, max(2, spans.text_seq_len))[1]
    for field in ("first_sentinel_id", "eos_token_id", "decoder_start_token_id"):
        token, least = getattr(spans, field), spans.num_sentinels - 1 if field[0] == "f" else 0
        if field[0] != "f" and last - count < token <= last:
            yield Fault(
                fact=f"data.span_corruption.{field}={token} with model.family={family}",
                rule=f"a text has the sentinels {last - count + 1} to {last}, and it is none of them",
                remedy=f"set data.span_corruption.{field} to the id that the tokenizer has for it",
            )
        if not least <= token < vocab_size:
            yield Fault(
                fact=f"data.span_corruption.{field}={token} with model.family={family}",
                rule=f"it is one of the model's tokens, {least} to {vocab_size - 1}"
                + (f": num_sentinels={spans.num_sentinels} ids end with it" if least else ""),
                remedy=f"set data.span_corruption.{field} to the id that the tokenizer has for it",
            )
    # the number of the other kind of spans
    idle = "max_span_length" if spans.span_lengths == "segments" else "mean_span_length"
    plain = getattr(SpanCorruptionSection(), idle)
    if getattr(spans, idle) != plain:
        yield Fault(
            fact=f"data.span_corruption.{idle}={getattr(spans, idle):g}",
            rule=f"it has no effect with data.span_corruption.span_lengths={spans.span_lengths}",
            remedy=f"leave data.span_corruption.{idle} out",
        )
    # text of a row
    most, text = raw_length(spans, *room), spans.text_seq_len
    made = corrupted_lengths(spans, max(2, text))
    yield from broken_rows(
        (
            (
                not 1 < text <= most,
                f"data.span_corruption.text_seq_len={text}",
                f"a text of {max(2, text)} tokens becomes {made[0]} of the encoder and {made[1]} of the decoder, which "
                f"read {room[0]} and {room[1]}",
                f"set data.span_corruption.text_seq_len={most}"
                if most
                else "set a larger data.seq_len and model.encoder_decoder.decoder_seq_len",
            ),
            (
                packing != "none" and multiple > 1,
                f"data.document_multiple={multiple} with model.family={family}",
                "layouts cut the streams, and no document",
                "set data.document_multiple=1",
            ),
            (
                packing != "none" and path.startswith(MEGATRON),
                f"data.packing={packing} with data.path={path} and model.family={family}",
                "documents of Megatron's files are read as a stream here",
                "set data.packing=none",
            ),
        )
    )


@reads("model.family encoder_decoder, parallel.tp cp cp_method sequence_parallel, data.seq_len")
def cut_faults(  # fields of one rule
    family: str,
    sides: EncoderDecoderSection,
    tp: int,
    cp: int,
    method: str,
    is_cut: bool,
    seq_len: int,
) -> Iterator[Fault]:
    """Check that each stream is cut evenly, and that keys are gathered."""
    if not family_parts(family).is_encoder_decoder:
        return
    unit = (2 * cp if cp > 1 else 1) * (tp if is_cut else 1)
    decoder = sides.decoder_seq_len
    yield from broken_rows(
        (
            (
                bool(decoder % unit or (seq_len - decoder) % unit),
                f"parallel.cp={cp}, tp={tp} and sequence_parallel={str(is_cut).lower()} with model.family={family}",
                f"each stream is cut evenly, so {unit} must divide the {seq_len - decoder} tokens of the encoder and "
                f"the {decoder} of the decoder",
                "change data.seq_len and model.encoder_decoder.decoder_seq_len, or use fewer ranks",
            ),
            (
                cp > 1 and method != "all_gather",
                f"parallel.cp_method={method} with model.family={family}",
                "each score has a bias by the positions of its two tokens, which no block of another rank's keys has "
                "in a ring's kernel, and tables of biases are cut by heads",
                "set parallel.cp_method=all_gather",
            ),
        )
    )


@reads(
    "model.family attention multipliers moe mla lora mup_base_width "
    "num_nextn_predict_layers neftune_noise_alpha head"
)
def model_option_faults(  # one an option
    family: str,
    attention: AttentionSection,
    multipliers: Any,
    moe: MoeSection,
    mla: MlaSection,
    lora: LoraSection,
    mup: int,
    depth: int,
    noise: float,
    head: HeadSection,
) -> Iterator[Fault]:
    """Check that the model has no option that streams do not have."""
    if not family_parts(family).is_encoder_decoder:
        return
    chosen = {
        "attention": attention != AttentionSection(),
        "multipliers": multipliers != type(multipliers)(),
        "moe": moe.num_experts > 0,
        "mla": mla.kv_lora_rank > 0,
        "lora.lora_dropout": lora.lora_dropout > 0,
        "mup_base_width": mup > 0,
        "num_nextn_predict_layers": depth > 0,
        "neftune_noise_alpha": noise > 0,
        "head": head.is_on,
    }
    for name, is_set in chosen.items():
        if is_set:
            yield Fault(
                fact=f"model.{name} is set with model.family={family}",
                rule="its blocks have T5's attention, feed-forward layer and initial values"
                if name != "head"
                else "scores are read from one stream of tokens, and it has two",
                remedy=f"leave model.{name} out",
            )


@reads(
    "model.family, data.loss_on, parallel.dynamic_cp, run.eval_tasks samples_every, preference.loss_type"
)
def run_option_faults(  # one an option
    family: str,
    loss_on: str,
    is_dynamic: bool,
    tasks: Sequence[EvalTask],
    samples_every: int,
    pair_loss: str,
) -> Iterator[Fault]:
    """Check that the run asks nothing that reads one stream of tokens."""
    if not family_parts(family).is_encoder_decoder:
        return
    spans = "rows are corrupted texts: the decoder predicts their spans"
    chosen = {
        f"data.loss_on={loss_on}": (loss_on != "auto", spans, "leave data.loss_on out"),
        "parallel.dynamic_cp=true": (is_dynamic, "it places documents of one stream", "set parallel.dynamic_cp=false"),
        "run.eval_tasks": (bool(tasks), spans, "leave run.eval_tasks out, and set run.eval_samples"),
        f"run.samples_every={samples_every}": (samples_every > 0, spans, "set run.samples_every=0"),
        f"preference.loss_type={pair_loss}": (pair_loss != "none", spans, "set preference.loss_type=none"),
    }  # fmt: skip
    for fact, (is_broken, rule, remedy) in chosen.items():
        if is_broken:
            yield Fault(fact=f"{fact} with model.family={family}", rule=rule, remedy=remedy)
