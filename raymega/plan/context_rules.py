"""Rules of context parallelism: what tokens and heads must be for cp ranks to share them out."""

from __future__ import annotations

from raymega.errors import Fault


def position_faults(tp: int, cp: int, seq_len: int, is_cut: bool) -> list[Fault]:  # noqa: FBT001
    """Each rank holds two chunks of a sequence, and under sequence parallelism tp ranks share them."""
    faults = []
    if cp > 1 and seq_len % (2 * cp):
        faults.append(
            Fault(
                fact=f"parallel.cp={cp}",
                rule=f"a sequence is cut into 2 * cp = {2 * cp} chunks, two a rank, so that must divide "
                f"data.seq_len={seq_len} (remainder {seq_len % (2 * cp)})",
                remedy=f"set data.seq_len={_multiple_near(seq_len, 2 * cp)}, or another parallel.cp",
            )
        )
    held = seq_len // cp
    if is_cut and not faults and held % tp:
        what = f"data.seq_len={seq_len}"
        if cp > 1:
            what += f" / parallel.cp={cp} = {held}"
        remedy = _multiple_near(seq_len, cp * tp * (2 if cp > 1 else 1))
        faults.append(
            Fault(
                fact=f"parallel.sequence_parallel=true with parallel.tp={tp}",
                rule=f"each rank holds as many positions as the others, so tp must divide {what} "
                f"(remainder {held % tp})",
                remedy=f"set data.seq_len={remedy}, another parallel.tp, or "
                "parallel.sequence_parallel=false",
            )
        )
    return faults


def exchange_faults(
    cp: int, method: str, inner: int, tp: int, heads: int, kv_heads: int | str
) -> list[Fault]:
    """Ranks that exchange heads have whole ones each, of queries as of keys and values."""
    if cp == 1 or method not in ("all_to_all", "hybrid"):
        return []
    if method == "hybrid" and (not 1 < inner < cp or cp % inner):
        legal = [str(d) for d in range(2, cp) if cp % d == 0]
        remedy = f"use one of {', '.join(legal)}" if legal else "use ring or all_to_all"
        return [
            Fault(
                fact=f"parallel.cp_inner={inner} with parallel.cp_method=hybrid",
                rule=f"it must divide parallel.cp={cp} and be neither 1 nor cp",
                remedy=f"{remedy}; parallel.cp_method=ring and all_to_all have no such number",
            )
        ]
    ranks, field = (inner, "cp_inner") if method == "hybrid" else (cp, "cp")
    asked = f"parallel.{field}={ranks} with parallel.cp_method={method}"
    of_each = f"model.num_heads={heads} / parallel.tp={tp} = {heads // tp}"
    if heads // tp % ranks:
        return [
            Fault(
                fact=asked,
                rule=f"ranks exchange whole heads, so it must divide {of_each} "
                f"(remainder {heads // tp % ranks})",
                remedy="set parallel.cp_method=ring, or a smaller parallel.tp",
            )
        ]
    held = max(1, (heads if kv_heads == "num_heads" else int(kv_heads)) // tp)
    if held % ranks and ranks % held:
        return [
            Fault(
                fact=asked,
                rule="ranks have whole key and value heads, or share one: it must divide the "
                f"{held} that model.num_kv_heads={kv_heads} leaves each of parallel.tp={tp} ranks, or "
                "be a multiple of them",
                remedy="set parallel.cp_method=ring, or another parallel.tp",
            )
        ]
    return []


def weight_dropout_faults(rate: float, cp: int, method: str) -> list[Fault]:
    """Only a rank that sees whole rows can drop attention weights: no fused kernel does it."""
    if not rate or cp == 1 or method == "all_to_all":
        return []
    return [
        Fault(
            fact=f"model.attention_dropout={rate:g} with parallel.cp={cp}",
            rule="weights are dropped without a fused kernel, in whole rows, and under "
            f"parallel.cp_method={method} no rank has one",
            remedy="set model.attention_dropout=0, or parallel.cp_method=all_to_all",
        )
    ]


def _multiple_near(number: int, of: int) -> int:
    """The largest multiple of ``of`` that is not above ``number``, or ``of`` itself."""
    return number - number % of or of
