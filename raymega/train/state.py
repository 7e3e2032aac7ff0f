"""TrainState: where a run stands. Its sample counter is the only position in the data there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from raymega.config.schema import PrecisionSection
from raymega.optim.loss_scale import LossScale, first_loss_scale

Scalars = dict[str, int | float | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Scalars that all ranks share and every checkpoint carries.

    Attributes:
        step: Completed steps.
        samples: Sequences consumed; the next step starts at this global sample.
        tokens: Unmasked tokens consumed.
        skipped_steps: Completed steps whose gradients overflowed, so that they updated nothing.
        loss_scale: Scale of the next step; None for formats that need none.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    loss_scale: LossScale | None = None

    @property
    def updates(self) -> int:
        """Updates of the parameters: what learning rate and bias correction go by."""
        return self.step - self.skipped_steps

    def advance(
        self,
        *,
        samples: int,
        tokens: int,
        is_skipped: bool = False,
        loss_scale: LossScale | None = None,
    ) -> TrainState:
        """The state after one more step, which leaves ``loss_scale`` to the next."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            skipped_steps=self.skipped_steps + is_skipped,
            loss_scale=loss_scale,
        )

    def scalars(self) -> Scalars:
        """As a checkpoint's manifest keeps it."""
        scalars: Scalars = {
            "step": self.step,
            "samples": self.samples,
            "tokens": self.tokens,
            "skipped_steps": self.skipped_steps,
        }
        if self.loss_scale is not None:
            scalars |= {
                "loss_scale": self.loss_scale.factor,
                "loss_scale_good_steps": self.loss_scale.good_steps,
                "loss_scale_overflows": self.loss_scale.overflows,
            }
        return scalars


def first_state(precision: PrecisionSection) -> TrainState:
    """The state of a run that has done nothing."""
    return TrainState(loss_scale=first_loss_scale(precision))


def state_from(scalars: Mapping[str, int | float | str], precision: PrecisionSection) -> TrainState:
    """Inverse of :meth:`TrainState.scalars`; raises KeyError when one is missing.

    A run that changes to float16 begins with the job's first scale, one that leaves it has none.
    """
    step, samples, tokens = (int(scalars[name]) for name in ("step", "samples", "tokens"))
    loss_scale = first_loss_scale(precision)
    if loss_scale is not None and "loss_scale" in scalars:
        loss_scale = LossScale(
            factor=float(scalars["loss_scale"]),
            good_steps=int(scalars["loss_scale_good_steps"]),
            overflows=int(scalars["loss_scale_overflows"]),
        )
    return TrainState(
        step=step,
        samples=samples,
        tokens=tokens,
        skipped_steps=int(scalars.get("skipped_steps", 0)),
        loss_scale=loss_scale,
    )
