"""Dynamic loss scale for float16, which keeps gradients within its 5 exponent bits.

The module is pure: the next scale is a function of the scale, the job and whether a gradient overflowed.
The executor starts backward from the scale, and `train/step.py` divides it out of the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.config.schema import PrecisionSection
from raymega.errors import Fault, NumericsError


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """Factor and the counts that decide its next change.

    Attributes:
        factor: Factor on the mean loss of a micro-batch.
        good_steps: Number of steps without overflow since the last overflow or doubling.
        overflows: Number of steps with overflow since the last doubling.
    """

    factor: float
    good_steps: int = 0
    overflows: int = 0

    def loss_gradient(self, *, micro_batch_tokens: int) -> float:
        """Return the gradient that backward starts from, for a loss summed over a micro-batch.

        The division by the (fixed) number of tokens makes it the factor of a mean loss. So float16
        gradients do not grow with the micro-batch, and one factor fits any grid.
        """
        return self.factor / micro_batch_tokens


def first_loss_scale(precision: PrecisionSection) -> LossScale | None:
    """Return the initial loss scale; None unless the dtype is float16."""
    return LossScale(factor=precision.loss_scale) if precision.dtype == "float16" else None


def next_loss_scale(
    scale: LossScale | None, precision: PrecisionSection, *, is_overflow: bool
) -> LossScale | None:
    """Return the loss scale of the next step.

    It doubles after ``loss_scale_window`` consecutive good steps. Since the last doubling, the first
    ``loss_scale_hysteresis`` - 1 overflows leave it as it is, and each later one halves it.

    Raises:
        NumericsError: A gradient overflowed at ``min_loss_scale``.
    """
    if scale is None:
        return None
    if is_overflow:
        return _after_overflow(scale, precision)
    # >=, as a run resumed with a shorter window may have more good steps than that already.
    if scale.good_steps + 1 >= precision.loss_scale_window:
        return LossScale(factor=2 * scale.factor)
    return LossScale(
        factor=scale.factor, good_steps=scale.good_steps + 1, overflows=scale.overflows
    )


def _after_overflow(scale: LossScale, precision: PrecisionSection) -> LossScale:
    # An overflow at the minimum is no transient: the run cannot continue in float16.
    if scale.factor <= precision.min_loss_scale:
        raise NumericsError(
            Fault(
                fact=f"a gradient overflowed float16 at loss scale {scale.factor:g}",
                rule=f"the scale may not fall below precision.min_loss_scale="
                f"{precision.min_loss_scale:g}",
                remedy="use precision.dtype=bfloat16, lower optimizer.lr, or lower the minimum",
            )
        )
    overflows = scale.overflows + 1
    is_forgiven = overflows < precision.loss_scale_hysteresis
    factor = scale.factor if is_forgiven else max(scale.factor / 2, precision.min_loss_scale)
    return LossScale(factor=factor, overflows=overflows)
