"""Check the rules of context parallelism: cp ranks get equal parts of tokens and of heads."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from raymega.config.moe import MoeSection
from raymega.errors import Fault
from raymega.plan.layers.family_parts import family_parts
from raymega.plan.validation.rule import broken_rows, reads

DYNAMIC = "parallel.dynamic_cp=true with "


@reads("parallel.tp cp, data.seq_len, parallel.sequence_parallel")
def position_faults(tp: int, cp: int, seq_len: int, is_cut: bool) -> Iterator[Fault]:
    """Check that 2 cp chunks divide a sequence, and that tp divides them under sequence parallelism."""
    if cp > 1 and seq_len % (2 * cp):
        yield Fault(
            fact=f"parallel.cp={cp}",
            rule=f"a sequence is cut into 2 * cp = {2 * cp} chunks, two a rank, so that must divide "
            f"data.seq_len={seq_len} (remainder {seq_len % (2 * cp)})",
            remedy=f"set data.seq_len={_multiple_near(seq_len, 2 * cp)}, or another parallel.cp",
        )
        return
    # sequence parallelism cuts the rank's positions over tp
    held = seq_len // cp
    if is_cut and held % tp:
        what = f"data.seq_len={seq_len}"
        if cp > 1:
            what += f" / parallel.cp={cp} = {held}"
        remedy = _multiple_near(seq_len, cp * tp * (2 if cp > 1 else 1))
        yield Fault(
            fact=f"parallel.sequence_parallel=true with parallel.tp={tp}",
            rule=f"each rank holds as many positions as the others, so tp must divide {what} "
            f"(remainder {held % tp})",
            remedy=f"set data.seq_len={remedy}, another parallel.tp, or "
            "parallel.sequence_parallel=false",
        )


@reads("data.packing, parallel.cp, data.document_multiple, parallel.dynamic_cp, model.family")
def document_faults(
    packing: str, cp: int, multiple: int, is_dynamic: bool, family: str
) -> Iterator[Fault]:
    """Check that 2 cp chunks divide each packed document; of two streams each is cut as a whole."""
    if packing == "none" or cp == 1 or is_dynamic or multiple % (2 * cp) == 0:
        return
    if family_parts(family).is_encoder_decoder:
        return
    yield Fault(
        fact=f"parallel.cp={cp} with data.packing={packing}",
        rule=f"each document is cut into 2 * cp = {2 * cp} chunks, so that must divide "
        f"data.document_multiple={multiple} (remainder {multiple % (2 * cp)})",
        remedy=f"begin the run with data.document_multiple={lcm(multiple, 2 * cp)}, or set "
        "parallel.cp=1",
    )


@reads(
    "parallel.dynamic_cp, data.packing, parallel.cp dp cp_method, schedule.micro_batch_size, "
    "tracking.activations_every"
)
def dynamic_faults(
    is_dynamic: bool,
    packing: str,
    cp: int,
    dp: int,
    method: str,
    micro_batch_size: int,
    activations_every: int,
) -> Iterator[Fault]:
    """Check the conditions of dynamic context parallelism: packs of documents on 1, 2, 4, ... ranks."""
    if not is_dynamic:
        return
    # most: the largest power of two that is not above dp * cp
    ranks, most = dp * cp, 1 << (dp * cp).bit_length() - 1
    rows = (
        (
            packing == "none",
            f"{DYNAMIC}data.packing=none",
            "it places documents, and rows that are not packed have none",
            "set data.packing=best_fit in a new run, or parallel.dynamic_cp=false",
        ),
        (
            bool(ranks & (ranks - 1)),
            f"{DYNAMIC}parallel.dp={dp} and parallel.cp={cp}",
            f"groups of 1, 2, 4, ... ranks must fill dp * cp = {ranks}",
            f"use dp * cp = {most}, or parallel.dynamic_cp=false",
        ),
        (
            method not in ("ring", "all_gather"),
            f"{DYNAMIC}parallel.cp_method={method}",
            "groups are of any size up to dp * cp, and heads cannot be exchanged in all",
            "set parallel.cp_method=ring or all_gather",
        ),
        (
            micro_batch_size > 1,
            f"{DYNAMIC}schedule.micro_batch_size={micro_batch_size}",
            "a micro-batch is one pack of documents, of data.seq_len / cp tokens a rank",
            "set schedule.micro_batch_size=1",
        ),
        (
            activations_every > 0,
            f"{DYNAMIC}tracking.activations_every={activations_every}",
            "statistics of activations count padding, which differs with the packs",
            "set tracking.activations_every=0",
        ),
    )
    yield from broken_rows(rows)


@reads("model.moe, parallel.dynamic_cp moe_token_dispatcher_type")
def dynamic_moe_faults(moe: MoeSection, is_dynamic: bool, dispatch: str) -> Iterator[Fault]:
    """Check that routing does not depend on the micro-batch, which differs between layouts.

    With dynamic context parallelism a token's experts may depend only on the token and the last step's load.
    """
    if not moe.num_experts or not is_dynamic:
        return
    rows = (
        (
            moe.capacity_factor > 0,
            f"{DYNAMIC}model.moe.capacity_factor={moe.capacity_factor:g}",
            "capacity is of the tokens of a micro-batch, which are others on each layout",
            "set model.moe.capacity_factor=0",
        ),
        (
            moe.load_balancing_type in ("micro_batch", "sequence", "sinkhorn"),
            f"{DYNAMIC}model.moe.load_balancing_type={moe.load_balancing_type}",
            "it depends on the tokens of a micro-batch or of a row, whose documents are in several packs",
            "set model.moe.load_balancing_type=global, or none with model.moe.expert_bias=true",
        ),
        (
            dispatch == "all_gather",
            f"{DYNAMIC}parallel.moe_token_dispatcher_type=all_gather",
            "it collects equally many tokens of each rank, and packs have different numbers",
            "set parallel.moe_token_dispatcher_type=all_to_all",
        ),
    )
    yield from broken_rows(rows)


@reads("precision.fp8, parallel.dynamic_cp")
def dynamic_fp8_faults(fp8: str, is_dynamic: bool) -> Iterator[Fault]:
    """Check that fp8 scales do not depend on the micro-batch, which differs between layouts."""
    if is_dynamic and fp8 == "tensorwise":
        yield Fault(
            fact=f"{DYNAMIC}precision.fp8=tensorwise",
            rule="a scale is that of a micro-batch's tensor, and with dynamic context parallelism "
            "every layout has other micro-batches",
            remedy="set precision.fp8=rowwise, or parallel.dynamic_cp=false",
        )


@reads("parallel.dynamic_cp cp tp, data.seq_len, parallel.sequence_parallel, model.moe")
def dynamic_length_faults(
    is_dynamic: bool, cp: int, tp: int, seq_len: int, is_cut: bool, moe: MoeSection
) -> Iterator[Fault]:
    """Check that cp ranks of seq_len / cp tokens hold the longest document in equal chunks.

    The tp ranks split the tokens that are routed to experts, with sequence parallelism or without.
    """
    # two chunks a rank, each a multiple of tp where tp splits tokens
    unit = cp * lcm(2, tp if is_cut or moe.num_experts else 1)
    if not is_dynamic or seq_len % unit == 0:
        return
    yield Fault(
        fact=f"parallel.dynamic_cp=true with data.seq_len={seq_len}",
        rule=f"{cp} ranks of two chunks each hold the longest document, so {unit} must divide it "
        f"(remainder {seq_len % unit})",
        remedy=f"set data.seq_len={_multiple_near(seq_len, unit)}",
    )


@reads("parallel.cp cp_method hierarchical_cp_size tp, model.num_heads num_kv_heads")
def exchange_faults(
    cp: int, method: str, inner: int, tp: int, heads: int, kv_heads: int | str
) -> Iterator[Fault]:
    """Check that ranks that exchange heads get whole query heads, and whole or shared key heads."""
    if cp == 1 or method not in ("all_to_all", "hybrid"):
        return
    # hybrid: the inner degree
    if method == "hybrid" and (not 1 < inner < cp or cp % inner):
        legal = [str(d) for d in range(2, cp) if cp % d == 0]
        remedy = f"use one of {', '.join(legal)}" if legal else "use ring or all_to_all"
        yield Fault(
            fact=f"parallel.hierarchical_cp_size={inner} with parallel.cp_method=hybrid",
            rule=f"it must divide parallel.cp={cp} and be neither 1 nor cp",
            remedy=f"{remedy}; parallel.cp_method=ring and all_to_all have no such number",
        )
        return
    # query heads
    ranks, field = (inner, "hierarchical_cp_size") if method == "hybrid" else (cp, "cp")
    asked = f"parallel.{field}={ranks} with parallel.cp_method={method}"
    of_each = f"model.num_heads={heads} / parallel.tp={tp} = {heads // tp}"
    if heads // tp % ranks:
        yield Fault(
            fact=asked,
            rule=f"ranks exchange whole heads, so it must divide {of_each} "
            f"(remainder {heads // tp % ranks})",
            remedy="set parallel.cp_method=ring, or a smaller parallel.tp",
        )
        return
    # key and value heads
    held = max(1, (heads if kv_heads == "num_heads" else int(kv_heads)) // tp)
    if held % ranks and ranks % held:
        yield Fault(
            fact=asked,
            rule="ranks have whole key and value heads, or share one: it must divide the "
            f"{held} that model.num_kv_heads={kv_heads} leaves each of parallel.tp={tp} ranks, or "
            "be a multiple of them",
            remedy="set parallel.cp_method=ring, or another parallel.tp",
        )


@reads("model.attention_dropout family, parallel.cp cp_method")
def weight_dropout_faults(rate: float, family: str, cp: int, method: str) -> Iterator[Fault]:
    """Check that ranks see whole rows where attention weights are dropped: no fused kernel does it."""
    has_streams = family_parts(family).is_encoder_decoder
    if rate and cp > 1 and method != "all_to_all":
        yield Fault(
            fact=f"model.attention_dropout={rate:g} with parallel.cp={cp}",
            rule="weights are dropped without a fused kernel, in whole rows, and under "
            f"parallel.cp_method={method} no rank has one",
            remedy="set model.attention_dropout=0, or "
            + ("parallel.cp=1" if has_streams else "parallel.cp_method=all_to_all"),
        )


def _multiple_near(number: int, of: int) -> int:
    """Return the largest multiple of ``of`` that is not above ``number``, or ``of`` itself."""
    return number - number % of or of
