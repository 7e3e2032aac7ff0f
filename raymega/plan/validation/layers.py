"""Check the rules of layers: windows, RoPE by layer, what families allow, and what encoders need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from raymega.config.attention import AttentionSection
from raymega.config.data import MEGATRON
from raymega.config.encoder import NO_TOKEN, EncoderSection, MaskingSection
from raymega.config.heads.section import HeadSection
from raymega.config.mla import MlaSection
from raymega.config.moe import MoeSection
from raymega.config.schema import EvalTask
from raymega.errors import Fault
from raymega.plan.layers.family_parts import FAMILY_PARTS, family_parts
from raymega.plan.layers.layer_pattern import ALONE, STATES
from raymega.plan.validation.rule import broken_rows, reads

ENCODERS = ", ".join(name for name, parts in FAMILY_PARTS.items() if not parts.is_causal)


@reads("model.attention num_layers")
def window_faults(attention: AttentionSection, num_layers: int) -> Iterator[Fault]:
    """Check that sliding layers have a window, that a window has layers, and the pattern's length."""
    kinds, window = attention.layer_types, attention.sliding_window
    has_sliding = "sliding" in kinds[:num_layers]
    has_chunks, chunk = "chunked" in kinds[:num_layers], attention.chunk_size
    has_plain = "no_positions" in kinds[:num_layers]
    # fields of scores, in a model whose layers have none
    has_scores, plain = not {*ALONE, *STATES}.issuperset(kinds[:num_layers]), AttentionSection()
    names = ("sinks", "softcap", "score_scale", "qk_norm", "partial_rotary_factor")
    idle = [name for name in names if getattr(attention, name) != getattr(plain, name)]
    yield from broken_rows(
        (
            (
                has_sliding and not window,
                "model.attention.layer_types has sliding and model.attention.sliding_window=0",
                "a token of a sliding layer sees at least itself, 1",
                "set model.attention.sliding_window",
            ),
            (
                bool(window) and not has_sliding,
                f"model.attention.sliding_window={window}",
                "model.attention.layer_types has no sliding layer among the model's "
                f"num_layers={num_layers}, so it has no effect",
                "set model.attention.layer_types to [sliding, full], or leave the window out",
            ),
            (
                has_chunks and not chunk,
                "model.attention.layer_types has chunked and model.attention.chunk_size=0",
                "a chunk has at least one token",
                "set model.attention.chunk_size",
            ),
            (
                bool(chunk) and not has_chunks,
                f"model.attention.chunk_size={chunk}",
                "model.attention.layer_types has no chunked layer among the model's "
                f"num_layers={num_layers}, so it has no effect",
                "set model.attention.layer_types to [chunked, full], or leave the size out",
            ),
            (
                bool(attention.temperature_floor) and not has_plain,
                f"model.attention.temperature_floor={attention.temperature_floor}",
                "model.attention.layer_types has no no_positions layer, so it has no effect",
                "leave it out, or set model.attention.layer_types to [full, no_positions]",
            ),
            (
                attention.temperature_scale != AttentionSection().temperature_scale
                and not attention.temperature_floor,
                f"model.attention.temperature_scale={attention.temperature_scale:g}",
                "with model.attention.temperature_floor=0 it has no effect",
                "set model.attention.temperature_floor, or leave it out",
            ),
            (
                bool(attention.sliding_rope_theta) and not has_sliding,
                f"model.attention.sliding_rope_theta={attention.sliding_rope_theta:g}",
                "without sliding layers it has no effect",
                "leave model.attention.sliding_rope_theta out",
            ),
            (
                bool(idle) and not has_scores,
                f"model.attention.{idle[0]}={str(getattr(attention, idle[0])).lower()}"
                if idle
                else "",
                "model.attention.layer_types has no attention among the model's "
                f"num_layers={num_layers}, so it has no effect",
                f"leave {' and '.join(idle)} out, or set model.attention.layer_types to [{kinds[0]}, full]",
            ),
            (
                len(kinds) > num_layers,
                f"model.attention.layer_types has {len(kinds)} kinds",
                f"it is repeated over model.num_layers={num_layers} layers, so it has at most as many",
                f"give at most {num_layers}",
            ),
        )
    )


@reads("model.attention family head_dim hidden_size num_heads mla")
def layer_rope_faults(  # fields of one rule
    attention: AttentionSection,
    family: str,
    head_dim: Any,
    hidden_size: int,
    num_heads: int,
    mla: MlaSection,
) -> Iterator[Fault]:
    """Check that RoPE exists where its fields are set, and turns pairs of features."""
    share = attention.partial_rotary_factor
    if family_parts(family).has_positions:
        # learned positions: no field of RoPE has an effect
        is_set = share != 1 or bool(attention.sliding_rope_theta)
        is_set |= "no_positions" in attention.layer_types
        if is_set:
            yield Fault(
                fact=f"model.attention sets positions of layers with model.family={family}",
                rule=f"{family} has learned positions and no RoPE",
                remedy="leave partial_rotary_factor, sliding_rope_theta and no_positions out",
            )
        return
    # RoPE: the part of a head that turns is a whole number of pairs
    is_derived = head_dim == "hidden_size / num_heads"
    width = hidden_size // num_heads if is_derived else head_dim
    turned = int(width * share)
    if share != 1 and not mla.kv_lora_rank and (turned % 2 or turned < 2):
        yield Fault(
            fact=f"model.attention.partial_rotary_factor={share:g}",
            rule=f"RoPE turns pairs of features, and {share:g} of a head's {width} are {turned}",
            remedy=f"use {max(2, turned + turned % 2) / width:g}",
        )


@reads("model.attention mla attention_dropout")
def score_rule_faults(attention: AttentionSection, mla: MlaSection, rate: float) -> Iterator[Fault]:
    """Check that rules of scores are set only where attention applies them."""
    plain = AttentionSection()
    changed = [name for name, value in attention if value != getattr(plain, name)]
    yield from broken_rows(
        (
            (
                bool(changed and mla.kv_lora_rank),
                f"model.attention.{changed[0]} is set with model.mla.kv_lora_rank={mla.kv_lora_rank}"
                if changed
                else "",
                "latent attention has one kind of layer and plain scores",
                "leave model.attention out",
            ),
            (
                bool(rate and _has_rules(attention)),
                f"model.attention_dropout={rate:g} with a window, chunks, a cap or sinks",
                "weights are dropped in plain causal attention only",
                "set model.attention_dropout=0",
            ),
        )
    )


def _has_rules(attention: AttentionSection) -> bool:
    """Return whether some layer has other scores than plain causal ones."""
    cut = attention.sliding_window or attention.chunk_size
    return bool(cut or attention.softcap or attention.sinks)


@reads("model.family moe attention")
def family_faults(family: str, moe: MoeSection, attention: AttentionSection) -> Iterator[Fault]:
    """Check that the family has experts if some are asked for, and norms if they are left out."""
    parts = family_parts(family)
    gates, others = ("silu", "clamped_silu"), ("gelu_tanh", "relu2")
    is_plain = parts.activation in (gates if parts.has_gate else others)
    yield from broken_rows(
        (
            (
                bool(moe.num_experts) and not is_plain,
                f"model.moe.num_experts={moe.num_experts} with model.family={family}",
                f"experts have SwiGLU, gpt2's GELU or ReLU^2, and {family} has {parts.activation}",
                "set model.moe.num_experts=0, or another model.family",
            ),
            (
                attention.qk_norm == "none" and parts.qk_norm == "none",
                f"model.attention.qk_norm=none with model.family={family}",
                f"{family} has no norms of queries and keys to leave out",
                "leave model.attention.qk_norm out",
            ),
        )
    )


@reads("model.family encoder, data.masking")
def decoder_faults(
    family: str, encoder: EncoderSection, masking: MaskingSection
) -> Iterator[Fault]:
    """Check that fields of encoders are set for encoders alone."""
    if not family_parts(family).is_causal:
        return
    sections = (("model.encoder", encoder), ("data.masking", masking))
    for name, section in sections:
        # a field with its default value is no choice of the job
        plain = type(section)()
        for field, value in section:
            if value != getattr(plain, field):
                text = str(value).lower() if isinstance(value, bool) else value
                yield Fault(
                    fact=f"{name}.{field}={text} with model.family={family}",
                    rule=f"{family} predicts the next token, so it has no effect",
                    remedy=f"leave {name}.{field} out, or set model.family to one of {ENCODERS}",
                )


@reads("model.family vocab_size encoder head, data.masking path seq_len, model.max_positions")
def mask_faults(  # of one rule
    family: str,
    vocab_size: int,
    encoder: EncoderSection,
    head: HeadSection,
    masking: MaskingSection,
    path: str,
    seq_len: int,
    max_positions: int,
) -> Iterator[Fault]:
    """Check the ids and shares of masks, and that a row holds its segments and positions."""
    parts = family_parts(family)
    if parts.is_causal or head.is_on:
        return
    # ids of special tokens
    for field in ("mask_token_id", "cls_token_id", "sep_token_id"):
        token = getattr(masking, field)
        is_missing = token == NO_TOKEN and field == "mask_token_id"
        if is_missing or token >= vocab_size:
            yield Fault(
                fact=f"data.masking.{field}={token} with model.family={family}",
                rule=f"it is one of the model's tokens, 0 to {vocab_size - 1}",
                remedy=f"set data.masking.{field} to the id that the tokenizer has for it",
            )
    # shares, segments, positions
    special = (masking.cls_token_id != NO_TOKEN) + (masking.sep_token_id != NO_TOKEN) * (
        1 + encoder.has_pairs
    )
    least, replaced = special + 1 + encoder.has_pairs, masking.mask_replace_prob
    yield from broken_rows(
        (
            (
                replaced + masking.random_replace_prob > 1,
                f"data.masking.mask_replace_prob={replaced:g} and random_replace_prob="
                f"{masking.random_replace_prob:g}",
                "they are shares of the predicted tokens, so their sum is at most 1",
                "use 0.8 and 0.1, as BERT does",
            ),
            (
                encoder.has_pairs and encoder.type_vocab_size < 2,
                f"model.encoder.type_vocab_size={encoder.type_vocab_size} with "
                f"model.encoder.sentence_loss={encoder.sentence_loss}",
                "segments A and B have types 0 and 1",
                "set model.encoder.type_vocab_size=2, or model.encoder.sentence_loss=none",
            ),
            (
                seq_len < least,
                f"data.seq_len={seq_len}",
                f"a row has {special} special tokens and {1 + encoder.has_pairs} or more others",
                f"set data.seq_len={least} or more",
            ),
            (
                seq_len + parts.first_position > max_positions >= seq_len,
                f"data.seq_len={seq_len} with model.max_positions={max_positions}",
                f"positions of {family} begin at row {parts.first_position} of their table",
                f"set data.seq_len={max_positions - parts.first_position} or less",
            ),
            (
                masking.whole_word and path.startswith(MEGATRON),
                f"data.masking.whole_word=true with data.path={path}",
                "Megatron's files have no tokenizer, which says where words begin",
                "set data.masking.whole_word=false",
            ),
        )
    )


@reads(
    "model.family attention num_nextn_predict_layers, data.loss_on, parallel.dynamic_cp, run.eval_tasks samples_every, "
    "preference.loss_type"
)
def next_token_faults(  # one an option
    family: str,
    attention: AttentionSection,
    depth: int,
    loss_on: str,
    is_dynamic: bool,
    tasks: Sequence[EvalTask],
    samples_every: int,
    pair_loss: str,
) -> Iterator[Fault]:
    """Check that encoders have no option of causal models."""
    if family_parts(family).is_causal:
        return
    end, masked = (
        f" with model.family={family}",
        "an encoder predicts masked tokens, and no next one",
    )
    yield from broken_rows(
        (
            (
                bool(attention.sliding_window or attention.softcap),
                f"model.attention.{'sliding_window' if attention.sliding_window else 'softcap'}"
                f"={attention.sliding_window or attention.softcap:g}{end}",
                "blocks with a window or a cap are causal",
                "leave model.attention.sliding_window and softcap out",
            ),
            (
                depth > 0,
                f"model.num_nextn_predict_layers={depth}{end}",
                masked,
                "set model.num_nextn_predict_layers=0",
            ),
            (
                loss_on != "auto",
                f"data.loss_on={loss_on}{end}",
                "data.masking chooses the tokens that count",
                "leave data.loss_on out",
            ),
            (
                is_dynamic,
                f"parallel.dynamic_cp=true{end}",
                "it places documents as they are stored, and masks are of whole rows",
                "set parallel.dynamic_cp=false",
            ),
            (
                bool(tasks),
                f"run.eval_tasks has {len(tasks)} entries{end}",
                masked,
                "leave run.eval_tasks out: run.eval_samples measures the loss of masked tokens",
            ),
            (
                samples_every > 0,
                f"run.samples_every={samples_every}{end}",
                masked,
                "set run.samples_every=0",
            ),
            (
                pair_loss != "none",
                f"preference.loss_type={pair_loss}{end}",
                masked,
                "set preference.loss_type=none, or a family that predicts the next token",
            ),
        )
    )
