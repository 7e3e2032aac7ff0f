"""Check the rules of tensor parallelism: tp divides heads, features and rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from raymega.config.attention import AttentionSection
from raymega.config.moe import MoeSection
from raymega.errors import Fault
from raymega.plan.layers.layer_pattern import EXPERTS, FEED_FORWARD
from raymega.plan.validation.rule import divisors, reads


@reads("parallel.tp, model.num_heads")
def head_faults(tp: int, heads: int) -> Iterator[Fault]:
    """Check that tp divides the query heads."""
    if heads % tp:
        yield Fault(
            fact=f"parallel.tp={tp}",
            rule=f"it must divide model.num_heads={heads} (remainder {heads % tp})",
            remedy=f"use one of {divisors(heads)}",
        )


@reads("parallel.tp, model.ffn_hidden_size moe attention num_layers")
def cut_width_faults(
    tp: int, ffn_hidden_size: int, moe: MoeSection, attention: AttentionSection, num_layers: int
) -> Iterator[Fault]:
    """Check that tp divides the width of dense feed-forward layers and of shared experts."""
    # A model whose blocks all hold experts has no dense layer; etp cuts its experts.
    is_any_dense = not all(moe.holds_experts(layer) for layer in range(num_layers))
    if EXPERTS in attention.layer_types:
        is_any_dense = FEED_FORWARD in attention.layer_types
    widths = {"model.ffn_hidden_size": ffn_hidden_size} if is_any_dense else {}
    if moe.num_experts and moe.shared_expert_intermediate_size:
        widths["model.moe.shared_expert_intermediate_size"] = moe.shared_expert_intermediate_size
    for field, width in widths.items():
        if width % tp:
            yield Fault(
                fact=f"parallel.tp={tp}",
                rule=f"it must divide {field}={width} (remainder {width % tp})",
                remedy=f"use one of {divisors(width)}",
            )


@reads("parallel.tp, model.num_heads num_kv_heads")
def kv_head_faults(tp: int, heads: int, kv_heads: int | str) -> Iterator[Fault]:
    """Check that ranks hold whole key and value heads, or that several share one."""
    if kv_heads == "num_heads":
        return
    assert isinstance(kv_heads, int), "strict parsing lets no other string through"
    if heads % kv_heads:
        yield Fault(
            fact=f"model.num_kv_heads={kv_heads}",
            rule=f"it must divide model.num_heads={heads} (remainder {heads % kv_heads})",
            remedy="use a divisor, or num_heads for as many as there are query heads",
        )
    if kv_heads % tp and tp % kv_heads:
        yield Fault(
            fact=f"parallel.tp={tp}",
            rule=f"ranks hold whole key and value heads, or share one: it must divide "
            f"model.num_kv_heads={kv_heads} or be a multiple of it",
            remedy=f"use a divisor of {kv_heads} or a multiple of it",
        )


@reads("parallel.tp, model.vocab_size make_vocab_size_divisible_by")
def vocabulary_faults(tp: int, vocab_size: int, multiple: int) -> Iterator[Fault]:
    """Check that tp divides the rows of the padded vocabulary."""
    rows = -(-vocab_size // multiple) * multiple
    if rows % tp:
        yield Fault(
            fact=f"parallel.tp={tp}",
            rule=f"it must divide the {rows} rows that model.vocab_size={vocab_size} has when "
            f"padded to a multiple of model.make_vocab_size_divisible_by={multiple} (remainder {rows % tp})",
            remedy=f"set model.make_vocab_size_divisible_by={lcm(multiple, tp)} in a new run, or use a tp that "
            f"divides {multiple}",
        )
