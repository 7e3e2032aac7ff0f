"""The loss scale of float16: how backward's gradients are kept inside a format of 5 exponent bits.

Pure: what it is after a step is a function of what it was, of the job, and of whether a gradient
overflowed. Who multiplies with it is the executor, who divides it out again train.step.
"""

from __future__ import annotations

from dataclasses import dataclass

from raymega.config.schema import PrecisionSection
from raymega.errors import Fault, NumericsError


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """The factor, and what decides about its next change.

    Attributes:
        factor: On the mean loss of a micro-batch.
        good_steps: Steps without overflow since the last overflow or doubling.
        overflows: Steps with one since the last doubling.
    """

    factor: float
    good_steps: int = 0
    overflows: int = 0

    def loss_gradient(self, *, micro_batch_tokens: int) -> float:
        """What backward starts from, the loss being a sum over the tokens of a micro-batch.

        Divided by their (fixed) number the factor means what it means for a mean loss: the size of
        gradients in float16 does not grow with the micro-batch, and a factor fits any grid.
        """
        return self.factor / micro_batch_tokens


def first_loss_scale(precision: PrecisionSection) -> LossScale | None:
    """What a run begins with; None for formats that need none."""
    return LossScale(factor=precision.loss_scale) if precision.dtype == "float16" else None


def next_loss_scale(
    scale: LossScale | None, precision: PrecisionSection, *, is_overflow: bool
) -> LossScale | None:
    """The scale of the step after.

    It doubles after ``loss_scale_window`` good steps in a row. Of the overflows since the last
    doubling the first ``loss_scale_hysteresis`` - 1 are forgiven, and each later one halves it.

    Raises:
        NumericsError: There was an overflow at the minimum.
    """
    if scale is None:
        return None
    if is_overflow:
        return _after_overflow(scale, precision)
    # A run that is taken up again with a shorter window may have more of them than that already.
    if scale.good_steps + 1 >= precision.loss_scale_window:
        return LossScale(factor=2 * scale.factor)
    return LossScale(
        factor=scale.factor, good_steps=scale.good_steps + 1, overflows=scale.overflows
    )


def _after_overflow(scale: LossScale, precision: PrecisionSection) -> LossScale:
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
