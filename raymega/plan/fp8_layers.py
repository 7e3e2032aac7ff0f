"""Which products a job makes in fp8."""

from __future__ import annotations

from dataclasses import dataclass

from raymega.config.schema import Job, PrecisionSection


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
