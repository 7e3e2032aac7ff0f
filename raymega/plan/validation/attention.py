"""Check the rules of attention: heads and their latents, positions, dropout of weights."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from raymega.config.attention import AttentionSection, LinearAttentionSection
from raymega.config.mla import MlaSection
from raymega.config.moe import MoeSection
from raymega.errors import Fault
from raymega.plan.layers.family_parts import family_parts
from raymega.plan.layers.layer_pattern import ALONE, EXPERTS, FEED_FORWARD, MAMBA, STATES
from raymega.plan.memory.state_bytes import DTYPE_BYTES
from raymega.plan.validation.rule import broken_rows, divisors, reads

MAX_ATTENTION_BYTES = 2 << 30
"""Most bytes of one layer's attention weights under dropout: a few such layers fill a GPU."""


@reads("model.hidden_size num_heads head_dim family mla")
def head_width_faults(
    width: int, heads: int, features: int | str, family: str, mla: MlaSection
) -> Iterator[Fault]:
    """Check that heads divide the hidden size, and that RoPE has pairs of features."""
    if mla.kv_lora_rank:
        return
    # the width, unless model.head_dim sets a head's
    is_derived = features == "hidden_size / num_heads"
    if is_derived and width % heads:
        lower = width - width % heads
        yield Fault(
            fact=f"model.hidden_size={width}",
            rule=f"it must be a multiple of model.num_heads={heads} (remainder {width % heads})",
            remedy=f"use {lower} or {lower + heads}, or set model.head_dim",
        )
        return
    # RoPE
    size = width // heads if is_derived else int(features)
    if family_parts(family).has_rope and size % 2:
        what = "model.hidden_size / model.num_heads = " if is_derived else "model.head_dim="
        yield Fault(
            fact=f"{what}{size}",
            rule=f"RoPE turns pairs of features, so a {family} head's width must be even",
            remedy="change hidden_size or num_heads" if is_derived else f"use {size + 1}",
        )


@reads(
    "model.rope_scaling family rope_low_freq_factor rope_high_freq_factor rope_beta_slow rope_beta_fast"
)
def rope_scaling_faults(scaling: str, family: str, *bounds: float) -> Iterator[Fault]:
    """Check that the family has RoPE, and that the bounds of its scaling are in order.

    ``bounds`` are low and high of llama3, then of yarn.
    """
    if scaling == "none":
        return
    has_rope = family_parts(family).has_rope
    if scaling == "linear" and has_rope:
        return
    if not has_rope:
        kind = "learned" if family_parts(family).has_positions else "relative"
        yield Fault(
            fact=f"model.rope_scaling={scaling}",
            rule=f"model.family={family} has {kind} positions and no RoPE to scale",
            remedy="set model.rope_scaling=none, or take another family",
        )
        return
    # each method has a lower and an upper bound of its own
    is_yarn = scaling == "yarn"
    low, high = bounds[2:] if is_yarn else bounds[:2]
    names = ("beta_slow", "beta_fast") if is_yarn else ("low_freq_factor", "high_freq_factor")
    # yarn's ramp lies between whole feature pairs, so equal bounds have one too (Kimi-K2 has 1 and 1)
    if low < high or (is_yarn and low == high):
        return
    yield Fault(
        fact=f"model.rope_{names[0]}={low:g}",
        rule=f"it must be {'at most' if is_yarn else 'less than'} model.rope_{names[1]}={high:g}",
        remedy="use 1 and 32 as YaRN does" if is_yarn else "use 1 and 4 as Llama 3.1 does",
    )


@reads("model.mla family num_kv_heads head_dim")
def mla_faults(
    mla: MlaSection, family: str, kv_heads: int | str, head_dim: int | str
) -> Iterator[Fault]:
    """Check the sizes of latent attention, which replace the heads'; without it they have no effect."""
    # off: no other field of the section may be set
    given = {name: number for name, number in mla if number and name != "kv_lora_rank"}
    if not mla.kv_lora_rank:
        for name, number in given.items():
            yield Fault(
                fact=f"model.mla.{name}={number} with model.mla.kv_lora_rank=0",
                rule="without a latent for keys and values attention is the ordinary one",
                remedy=f"set model.mla.kv_lora_rank, or model.mla.{name}=0",
            )
        return
    # on: the family, and the sizes of heads
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    latent = f"with model.mla.kv_lora_rank={mla.kv_lora_rank}"
    rows = (
        (
            family != "llama",
            f"model.family={family} {latent}",
            "latents have RoPE and RMSNorm, no biases and no norms of heads",
            "set model.family=llama",
        ),
        (
            kv_heads != "num_heads",
            f"model.num_kv_heads={kv_heads} {latent}",
            "every query head has keys and values of its own, made of the latent",
            "leave model.num_kv_heads out",
        ),
        (
            head_dim != "hidden_size / num_heads",
            f"model.head_dim={head_dim} {latent}",
            "model.mla says how wide heads are",
            "leave model.head_dim out",
        ),
        (
            not mla.qk_rope_head_dim or mla.qk_rope_head_dim % 2 == 1,
            f"model.mla.qk_rope_head_dim={mla.qk_rope_head_dim} {latent}",
            "RoPE turns pairs of features, and without any no head knows positions",
            "use an even number such as 64",
        ),
        (
            width > 0 and not 0 < mla.v_head_dim <= width,
            f"model.mla.v_head_dim={mla.v_head_dim} {latent}",
            f"values are at least 1 wide, and no wider than keys, nope + rope = {width}",
            f"use 1 to {width}",
        ),
    )
    yield from broken_rows(rows)


@reads("model.mla")
def indexer_faults(mla: MlaSection) -> Iterator[Fault]:
    """Check that an indexer has all its sizes, and the latent that it reads."""
    sizes = {name: getattr(mla, name) for name in ("index_n_heads", "index_head_dim", "index_topk")}
    given, missing = (
        [n for n, size in sizes.items() if bool(size) is is_set] for is_set in (True, False)
    )
    if not given or not mla.kv_lora_rank:
        return
    first, width = f"model.mla.{given[0]}={sizes[given[0]]}", mla.index_head_dim
    yield from broken_rows(
        (
            (
                bool(missing),
                f"{first} with model.mla.{missing[0]}=0" if missing else "",
                "an indexer has heads, their width, and a number of tokens to choose",
                "set index_n_heads, index_head_dim and index_topk, or none of them",
            ),
            (
                not mla.q_lora_rank,
                f"{first} with model.mla.q_lora_rank=0",
                "an indexer's queries are made of the queries' latent",
                "set model.mla.q_lora_rank, or leave the indexer out",
            ),
            (
                0 < width < mla.qk_rope_head_dim,
                f"model.mla.index_head_dim={width}",
                f"model.mla.qk_rope_head_dim={mla.qk_rope_head_dim} of its features turn",
                f"use {mla.qk_rope_head_dim} or more",
            ),
        )
    )


@reads("model.mla, data.seq_len")
def index_length_faults(mla: MlaSection, seq_len: int) -> Iterator[Fault]:
    """Check that an indexer would choose all tokens of a row: attention sees all."""
    if mla.index_topk and mla.index_n_heads and seq_len > mla.index_topk:
        yield Fault(
            fact=f"data.seq_len={seq_len} with model.mla.index_topk={mla.index_topk}",
            rule=f"the indexer would leave tokens out of longer rows than {mla.index_topk}, and attention here "
            "sees all, which is another function",
            remedy=f"set data.seq_len={mla.index_topk} or less",
        )


@reads("model.mla rope_scaling rope_mscale_all_dim")
def score_scale_faults(mla: MlaSection, scaling: str, weight: float) -> Iterator[Fault]:
    """Check that YaRN's factor on whole scores is set only with latent attention."""
    if not weight or (mla.kv_lora_rank and scaling == "yarn"):
        return
    yield Fault(
        fact=f"model.rope_mscale_all_dim={weight:g} with model.mla.kv_lora_rank={mla.kv_lora_rank} and "
        f"model.rope_scaling={scaling}",
        rule="scores of whole heads are scaled in latent attention with yarn only",
        remedy="set model.rope_mscale_all_dim=0",
    )


@reads("model.num_nextn_predict_layers, data.seq_len")
def mtp_faults(depth: int, seq_len: int) -> Iterator[Fault]:
    """Check that a row has the furthest token that the model predicts."""
    if depth >= seq_len:
        yield Fault(
            fact=f"model.num_nextn_predict_layers={depth}",
            rule=f"a row of data.seq_len={seq_len} has no token so far ahead",
            remedy=f"use at most {seq_len - 1}",
        )


@reads("data.seq_len, model.max_positions family")
def position_faults(seq_len: int, longest: int, family: str) -> Iterator[Fault]:
    """Check that a sequence has no more positions than the model; T5's are relative, and have no end."""
    if seq_len > longest and not family_parts(family).is_encoder_decoder:
        yield Fault(
            fact=f"data.seq_len={seq_len}",
            rule=f"it must not exceed model.max_positions={longest}",
            remedy=f"set model.max_positions={seq_len} or shorten the sequence",
        )


@reads("data.packing, model.attention_dropout")
def packed_dropout_faults(packing: str, rate: float) -> Iterator[Fault]:
    """Check that attention weights are dropped only in rows without packed documents."""
    if rate and packing != "none":
        yield Fault(
            fact=f"model.attention_dropout={rate:g} with data.packing={packing}",
            rule="weights are dropped in whole S x S squares, and packed tokens see their own "
            "document only",
            remedy="set model.attention_dropout=0, or data.packing=none",
        )


@reads(
    "model.attention_dropout, data.seq_len, model.num_heads, parallel.tp cp, "
    "schedule.micro_batch_size, precision.dtype"
)
def weight_faults(
    rate: float, seq_len: int, heads: int, tp: int, cp: int, micro_batch_size: int, dtype: str
) -> Iterator[Fault]:
    """Check the memory of attention dropout, which keeps S x S weights a head, twice, and a mask."""
    # without the fused kernel: weights before and after dropout, and one byte a weight for the mask
    held = heads // (tp * cp)
    num_bytes = micro_batch_size * held * seq_len**2 * (2 * DTYPE_BYTES[dtype] + 1)
    if not rate or num_bytes <= MAX_ATTENTION_BYTES:
        return
    # The bytes grow with seq_len squared.
    shorter = isqrt(MAX_ATTENTION_BYTES * seq_len**2 // num_bytes)
    yield Fault(
        fact=f"model.attention_dropout={rate:g}",
        rule=f"it needs every attention weight in memory, {num_bytes / 2**30:.1f} GiB in each "
        f"layer for {micro_batch_size} x {held} heads of {seq_len} x {seq_len} on a "
        f"rank; at most {MAX_ATTENTION_BYTES / 2**30:g} GiB is allowed",
        remedy="set model.attention_dropout=0, which needs none, or take more parallel.tp, a "
        f"smaller schedule.micro_batch_size or data.seq_len of at most {shorter}",
    )


@reads("model.attention linear_attention num_layers family, precision.fp8")
def linear_faults(
    attention: AttentionSection,
    linear: LinearAttentionSection,
    num_layers: int,
    family: str,
    fp8: str,
) -> Iterator[Fault]:
    """Check that states have sizes, that sizes have layers, and what layers of these kinds run with."""
    own = attention.layer_types[:num_layers]
    kinds = [kind for kind in STATES if kind in own]
    kind, plain = (kinds or STATES)[0], LinearAttentionSection()
    has_layers, parts = bool(kinds), family_parts(family)
    sizes = {
        name: size for name, size in linear if name not in ("conv_kernel_dim", "time_step_min")
    }
    missing = [name for name, size in sizes.items() if not size]
    changed = [name for name, size in linear if size != getattr(plain, name)]
    asked = f"model.attention.layer_types has {kind}"
    yield from broken_rows(
        (
            (
                has_layers and bool(missing),
                f"{asked} and model.linear_attention.{missing[0]}=0" if missing else "",
                "heads and their features are at least 1",
                "set model.linear_attention, such as {num_key_heads: 4, num_value_heads: 8, "
                "key_head_dim: 16, value_head_dim: 16}",
            ),
            (
                bool(changed) and not has_layers,
                f"model.linear_attention.{changed[0]}={getattr(linear, changed[0])}"
                if changed
                else "",
                f"model.attention.layer_types has no {' or '.join(STATES)} among the model's "
                f"num_layers={num_layers}, so it has no effect",
                f"set model.attention.layer_types to [{kind}, full], or leave the section out",
            ),
            (
                not missing and linear.num_value_heads % max(1, linear.num_key_heads) > 0,
                f"model.linear_attention.num_value_heads={linear.num_value_heads}",
                f"as many value heads read each of num_key_heads={linear.num_key_heads} "
                f"(remainder {linear.num_value_heads % max(1, linear.num_key_heads)})",
                f"use {max(1, linear.num_value_heads // max(1, linear.num_key_heads)) * linear.num_key_heads}",
            ),
            (
                has_layers and not parts.is_causal,
                f"{asked} with model.family={family}",
                "a state holds earlier tokens, and an encoder sees later ones too",
                f"leave {kind} out of model.attention.layer_types, or take another family",
            ),
            (
                has_layers and fp8 != "none",
                f"{asked} with precision.fp8={fp8}",
                "their projections hold decays, which add up over a document, and are not run in 8 bits",
                "set precision.fp8=none",
            ),
        )
    )


@reads("model.attention linear_attention num_layers family moe")
def block_kind_faults(
    attention: AttentionSection,
    linear: LinearAttentionSection,
    num_layers: int,
    family: str,
    moe: MoeSection,
) -> Iterator[Fault]:
    """Check that a model has one kind of states, and that families of one part a block alone have such blocks."""
    own, parts = attention.layer_types[:num_layers], family_parts(family)
    kinds = [kind for kind in STATES if kind in own]
    kind, has_layers = (kinds or STATES)[0], bool(kinds)
    alone = [each for each in ALONE if each in own]
    yield from broken_rows(
        (
            (
                len(kinds) > 1,
                f"model.attention.layer_types has {' and '.join(kinds)}",
                "model.linear_attention has the sizes of one of them",
                "use one",
            ),
            (
                bool(linear.time_step_min) and has_layers and kind != MAMBA,
                f"model.linear_attention.time_step_min={linear.time_step_min:g} with {kind} layers",
                f"only {MAMBA} has time steps",
                "leave it out",
            ),
            (
                bool(alone) and not parts.has_one_part,
                f"model.attention.layer_types has {alone[0] if alone else FEED_FORWARD} with model.family={family}",
                f"each block of {family} has a feed-forward layer or experts already",
                f"leave {' and '.join(alone)} out, or set model.family=nemotron_h",
            ),
            (
                bool(moe.num_experts) and parts.has_one_part and EXPERTS not in own,
                f"model.moe.num_experts={moe.num_experts} with model.family={family}",
                f"its blocks with experts are where model.attention.layer_types says, and it has no {EXPERTS}",
                f"set model.moe.num_experts=0, or layer_types such as [{MAMBA}, {EXPERTS}]",
            ),
            (
                EXPERTS in own and not moe.num_experts,
                f"model.attention.layer_types has {EXPERTS} and model.moe.num_experts=0",
                "such a block has at least one expert",
                f"set model.moe.num_experts, or {FEED_FORWARD} in place of {EXPERTS}",
            ),
            (
                EXPERTS in own and (moe.layer_freq, moe.first_k_dense_replace) != (1, 0),
                f"model.moe.layer_freq={moe.layer_freq} and first_k_dense_replace={moe.first_k_dense_replace} "
                f"with {EXPERTS} in model.attention.layer_types",
                "the kinds of layers say which blocks have experts, so they have no effect",
                "leave them out",
            ),
        )
    )


@reads("model.attention linear_attention, parallel.tp cp dp dynamic_cp")
def linear_head_faults(  # axes of one rule
    attention: AttentionSection,
    linear: LinearAttentionSection,
    tp: int,
    cp: int,
    dp: int,
    is_dynamic: bool,
) -> Iterator[Fault]:
    """Check that ranks have whole key heads of layers with states: tp by cutting, cp by exchange."""
    heads = linear.num_key_heads
    if not heads or not set(STATES).intersection(attention.layer_types):
        return
    ranks, field = (dp * cp, "dp * cp") if is_dynamic else (cp, "cp")
    if heads % tp:
        yield Fault(
            fact=f"parallel.tp={tp}",
            rule=f"it must divide model.linear_attention.num_key_heads={heads} (remainder {heads % tp})",
            remedy=f"use one of {divisors(heads)}",
        )
    elif heads // tp % ranks:
        yield Fault(
            fact=f"parallel.{field}={ranks} with model.linear_attention",
            rule="ranks exchange whole key heads there, so it must divide "
            f"model.linear_attention.num_key_heads={heads} / parallel.tp={tp} = {heads // tp} "
            f"(remainder {heads // tp % ranks})",
            remedy=f"use one of {divisors(heads // tp)}, or a smaller parallel.tp",
        )
