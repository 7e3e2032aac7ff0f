"""Check the rules of sizes that differ by layer: their lists, what they go with, and how axes cut each layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import Any

from raymega.config.attention import LayerSizesSection
from raymega.config.mla import MlaSection
from raymega.config.moe import MoeSection
from raymega.errors import Fault
from raymega.plan.layers.family_parts import family_parts
from raymega.plan.validation.context_parallel import exchange_faults
from raymega.plan.validation.rule import broken_rows, divisors, reads
from raymega.plan.validation.tensor_parallel import head_faults, kv_head_faults


@reads("model.layer_sizes num_layers ffn_hidden_size num_heads num_kv_heads head_dim")
def list_faults(  # fields of one rule
    sizes: LayerSizesSection,
    num_layers: int,
    ffn_hidden_size: int,
    num_heads: int,
    num_kv_heads: int | str,
    head_dim: int | str,
) -> Iterator[Fault]:
    """Check the length of each list, and that the model's own size is the largest of it."""
    own: dict[str, Any] = {
        "ffn_hidden_size": ffn_hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
    }
    for name, listed in sizes:
        if len(listed) > num_layers:
            yield Fault(
                fact=f"model.layer_sizes.{name} has {len(listed)} sizes",
                rule=f"it is repeated over model.num_layers={num_layers} layers, so it has at most as many",
                remedy=f"give at most {num_layers}",
            )
        if listed and own[name] != max(listed):
            yield Fault(
                fact=f"model.{name}={own[name]} with model.layer_sizes.{name}",
                rule=f"it is the largest of its layers', {max(listed)}",
                remedy=f"set model.{name}={max(listed)}",
            )
    if sizes.num_heads and not isinstance(head_dim, int):
        yield Fault(
            fact=f"model.layer_sizes.num_heads with model.head_dim={head_dim!r}",
            rule="layers with other numbers of heads have heads of one width, for which RoPE is made",
            remedy="set model.head_dim to a number, such as 64",
        )


@reads("model.layer_sizes family mla moe, precision.fp8")
def part_faults(
    sizes: LayerSizesSection, family: str, mla: MlaSection, moe: MoeSection, fp8: str
) -> Iterator[Fault]:
    """Check that the model has no parts whose sizes are one number for all layers."""
    if not sizes.is_on:
        return
    name = next(name for name, listed in sizes if listed)
    asked = f"model.layer_sizes.{name}"
    yield from broken_rows(
        (
            (
                family_parts(family).is_encoder_decoder,
                f"{asked} with model.family={family}",
                "tables of relative positions are shared by all blocks of a side",
                "leave model.layer_sizes out",
            ),
            (
                bool(mla.kv_lora_rank),
                f"{asked} with model.mla.kv_lora_rank={mla.kv_lora_rank}",
                "latent attention has one number of heads",
                "leave model.layer_sizes or model.mla out",
            ),
            (
                bool(sizes.ffn_hidden_size and moe.num_experts)
                and moe.intermediate_size == "ffn_hidden_size",
                f"{asked} with model.moe.intermediate_size=ffn_hidden_size",
                "experts of all blocks have one width",
                "set model.moe.intermediate_size to a number",
            ),
            (
                fp8 != "none",
                f"{asked} with precision.fp8={fp8}",
                "products in 8 bits are counted and cut alike in all blocks",
                "set precision.fp8=none",
            ),
        )
    )


@reads(
    "model.layer_sizes num_heads num_kv_heads ffn_hidden_size num_layers num_nextn_predict_layers, "
    "parallel.tp cp cp_method hierarchical_cp_size"
)
def cut_faults(  # fields of one rule
    sizes: LayerSizesSection,
    num_heads: int,
    num_kv_heads: int | str,
    ffn_hidden_size: int,
    num_layers: int,
    num_further: int,
    tp: int,
    cp: int,
    method: str,
    inner: int,
) -> Iterator[Fault]:
    """Check that tp and cp cut the heads and widths of each layer, as they do those of the model."""
    if not sizes.is_on:
        return
    # Blocks of multi-token prediction continue the lists. No combination of sizes is new after their common period.
    period = lcm(*(len(listed) for _, listed in sizes if listed))
    # layers of the same sizes break the same rules: the first of them is named
    seen = set()
    for layer in range(min(period, num_layers + num_further)):
        own: dict[str, Any] = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "ffn_hidden_size": ffn_hidden_size,
        }
        own |= sizes.of(layer)
        heads, kv_heads, width = own.values()
        if (heads, kv_heads, width) in seen:
            continue
        seen.add((heads, kv_heads, width))
        found = [*head_faults(tp, heads), *kv_head_faults(tp, heads, kv_heads)]
        found += [] if found else exchange_faults(cp, method, inner, tp, heads, kv_heads)
        if width % tp:
            rule = f"it must divide model.ffn_hidden_size={width} (remainder {width % tp})"
            remedy = f"use one of {divisors(int(width))}"
            found.append(Fault(fact=f"parallel.tp={tp}", rule=rule, remedy=remedy))
        yield from (replace(each, fact=f"{each.fact}, layer {layer}") for each in found)
