"""Which products a job makes in fp8, and the rules of that."""

from __future__ import annotations

from dataclasses import dataclass

from raymega.config.schema import Job, PrecisionSection
from raymega.errors import Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Coverage:
    """Which of a block's matrix products are in 8 bits.

    Attributes:
        linears: Of linear layers: outputs, and gradients of inputs.
        weight_gradients: Their weights' gradients.
        experts: Of experts: outputs, and gradients of inputs.
        expert_gradients: Their weights' gradients.
        reduces_rows: Each token's largest magnitude is taken over tp where features are cut.
    """

    linears: bool = False
    weight_gradients: bool = False
    experts: bool = False
    expert_gradients: bool = False
    reduces_rows: bool = False


ALL_IN_EIGHT = Fp8Coverage(linears=True, weight_gradients=True, experts=True, expert_gradients=True)
NONE_IN_EIGHT = Fp8Coverage()


def fp8_coverage(precision: PrecisionSection) -> Fp8Coverage:
    """What the job asks for, of a block that is not kept in the compute dtype."""
    is_by_row = precision.fp8 == "rowwise"
    return Fp8Coverage(
        linears=precision.fp8 != "none",
        weight_gradients=precision.fp8 == "tensorwise",
        experts=precision.fp8 != "none",
        reduces_rows=is_by_row,
    )


def fp8_blocks(num_layers: int, precision: PrecisionSection) -> range:
    """Numbers of the blocks whose linear layers multiply in fp8."""
    if precision.fp8 == "none":
        return range(0)
    return range(precision.fp8_end_blocks, num_layers - precision.fp8_end_blocks)


def goes_by_micro_batch(job: Job) -> bool:
    """A run with micro-batches of another size is another run."""
    return job.model.moe.goes_by_micro_batch or job.precision.fp8 == "tensorwise"


def fp8_dtype_faults(fp8: str, dtype: str) -> list[Fault]:
    """Gradients of float16 carry a scale that moves."""
    if fp8 == "none" or dtype != "float16":
        return []
    return [
        Fault(
            fact=f"precision.fp8={fp8} with precision.dtype=float16",
            rule="fp8 scales every tensor by itself, and float16 adds a loss scale that would be "
            "searched for beside it",
            remedy="set precision.dtype=bfloat16, or precision.fp8=none",
        )
    ]


def fp8_block_faults(fp8: str, end_blocks: int, num_layers: int) -> list[Fault]:
    """Some block is left for fp8."""
    if fp8 == "none" or 2 * end_blocks < num_layers:
        return []
    most = (num_layers - 1) // 2
    return [
        Fault(
            fact=f"precision.fp8_end_blocks={end_blocks} with precision.fp8={fp8}",
            rule=f"so many first and so many last blocks stay in precision.dtype, and of "
            f"model.num_layers={num_layers} none is left (2 * {end_blocks} >= {num_layers})",
            remedy=f"use at most {most}, or precision.fp8=none",
        )
    ]


def fp8_head_faults(fp8: str, tp: int, heads: int, kv_heads: int | str) -> list[Fault]:
    """Ranks that share a key head have terms of its gradient, which would be rounded one by one."""
    number = heads if kv_heads == "num_heads" else int(kv_heads)
    if fp8 == "none" or number % tp == 0:
        return []
    legal = ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
    return [
        Fault(
            fact=f"parallel.tp={tp} with precision.fp8={fp8}",
            rule=f"it must divide model.num_kv_heads={number}: ranks that share a key head would each "
            "round their own term of its gradient, and other layouts the sum",
            remedy=f"use one of {legal}, or precision.fp8=none",
        )
    ]


def fp8_dynamic_faults(fp8: str, is_dynamic: bool) -> list[Fault]:  # noqa: FBT001
    """Under dynamic context parallelism a micro-batch is another on each layout."""
    if fp8 != "tensorwise" or not is_dynamic:
        return []
    return [
        Fault(
            fact="parallel.dynamic_cp=true with precision.fp8=tensorwise",
            rule="a scale is that of a micro-batch's tensor, and with dynamic context parallelism "
            "every layout has other micro-batches",
            remedy="set precision.fp8=rowwise, or parallel.dynamic_cp=false",
        )
    ]


FP8_CHECKS = (
    (("precision.fp8", "precision.dtype"), fp8_dtype_faults),
    (("precision.fp8", "precision.fp8_end_blocks", "model.num_layers"), fp8_block_faults),
    (("precision.fp8", "parallel.tp", "model.num_heads", "model.num_kv_heads"), fp8_head_faults),
    (("precision.fp8", "parallel.dynamic_cp"), fp8_dynamic_faults),
)
"""Fields and what checks them."""
