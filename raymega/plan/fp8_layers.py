"""Decide which matrix products of a job run in fp8."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raymega.config.schema import Job, PrecisionSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Coverage:
    """Matrix products of a block that run in fp8.

    Attributes:
        linears: Whether outputs and input gradients of linear layers are computed in fp8.
        weight_gradients: Whether weight gradients of linear layers are computed in fp8.
        experts: Whether outputs and input gradients of experts are computed in fp8.
        expert_gradients: Whether weight gradients of experts are computed in fp8.
        reduces_rows: Whether each token's largest magnitude is reduced over tp where features are
            cut.
    """

    linears: bool = False
    weight_gradients: bool = False
    experts: bool = False
    expert_gradients: bool = False
    reduces_rows: bool = False


ALL_IN_EIGHT = Fp8Coverage(linears=True, weight_gradients=True, experts=True, expert_gradients=True)
BY_ROW_IN_EIGHT = replace(ALL_IN_EIGHT, weight_gradients=False, expert_gradients=False)
NONE_IN_EIGHT = Fp8Coverage()


def fp8_coverage(precision: PrecisionSection) -> Fp8Coverage:
    """Return the products that the job runs in fp8, in a block that is not kept in its dtype."""
    is_by_row = precision.fp8 == "rowwise"
    return Fp8Coverage(
        linears=precision.fp8 != "none",
        weight_gradients=precision.fp8 == "tensorwise",
        experts=precision.fp8 != "none",
        reduces_rows=is_by_row,
    )


def fp8_blocks(num_layers: int, precision: PrecisionSection) -> range:
    """Return the numbers of the blocks whose linear layers multiply in fp8."""
    if precision.fp8 == "none":
        return range(0)
    # The first and the last blocks stay in the compute dtype.
    return range(precision.fp8_end_blocks, num_layers - precision.fp8_end_blocks)


def depends_on_micro_batch_size(job: Job) -> bool:
    """Return whether another micro-batch size would change the results of the run."""
    return job.model.moe.depends_on_micro_batch_size or job.precision.fp8 == "tensorwise"
