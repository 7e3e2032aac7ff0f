"""Check the rules of precision: fp8 and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from raymega.errors import Fault
from raymega.plan.validation.rule import divisors, reads


@reads("precision.fp8 dtype")
def fp8_dtype_faults(fp8: str, dtype: str) -> Iterator[Fault]:
    """Check that fp8 is not combined with float16, whose loss scale changes during a run."""
    if fp8 != "none" and dtype == "float16":
        yield Fault(
            fact=f"precision.fp8={fp8} with precision.dtype=float16",
            rule="fp8 scales every tensor by itself, and float16 would add a search for a loss "
            "scale",
            remedy="set precision.dtype=bfloat16, or precision.fp8=none",
        )


@reads("precision.fp8 fp8_end_blocks, model.num_layers")
def fp8_block_faults(fp8: str, end_blocks: int, num_layers: int) -> Iterator[Fault]:
    """Check that the blocks kept in the compute dtype leave some for fp8."""
    if fp8 != "none" and 2 * end_blocks >= num_layers:
        yield Fault(
            fact=f"precision.fp8_end_blocks={end_blocks} with precision.fp8={fp8}",
            rule="that many first and last blocks stay in precision.dtype, and of "
            f"model.num_layers={num_layers} none is left (2 * {end_blocks} >= {num_layers})",
            remedy=f"use at most {(num_layers - 1) // 2}, or precision.fp8=none",
        )


@reads("precision.fp8, parallel.tp, model.num_heads num_kv_heads")
def fp8_head_faults(fp8: str, tp: int, heads: int, kv_heads: int | str) -> Iterator[Fault]:
    """Check that no two tp ranks share a key head under fp8.

    Each would round its own term of the head's gradient.
    """
    number = heads if kv_heads == "num_heads" else int(kv_heads)
    if fp8 == "none" or number % tp == 0:
        return
    yield Fault(
        fact=f"parallel.tp={tp} with precision.fp8={fp8}",
        rule=f"it must divide model.num_kv_heads={number}: ranks that share a key head would each "
        "round their own term of its gradient, and other layouts the sum",
        remedy=f"use one of {divisors(number)}, or precision.fp8=none",
    )


@reads("precision.loss_scale min_loss_scale")
def loss_scale_faults(first: float, smallest: float) -> Iterator[Fault]:
    """Check that the loss scale does not start below its minimum."""
    if smallest > first:
        yield Fault(
            fact=f"precision.min_loss_scale={smallest:g}",
            rule=f"it must not exceed precision.loss_scale={first:g}",
            remedy=f"use at most {first:g}",
        )
