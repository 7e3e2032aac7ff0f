"""TrainState: where a run stands. Its sample counter is the only position in the data there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        skipped_steps: Completed steps that updated nothing: their gradients overflowed float16, or
            their batch was left out.
        bad_steps: How many batches were left out in a row up to here.
        loss_scale: Scale of the next step; None for formats that need none.
        losses: Of the newest steps that updated something, oldest first: what is usual.
        grad_norms: The same.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    bad_steps: int = 0
    loss_scale: LossScale | None = None
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()

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

    def remember(self, *, loss: float, grad_norm: float, window: int) -> TrainState:
        """A step was as it should be, or is taken for it; the newest ``window`` steps are kept."""
        losses, grad_norms = (*self.losses, loss), (*self.grad_norms, grad_norm)
        return replace(self, bad_steps=0, losses=losses[-window:], grad_norms=grad_norms[-window:])

    def past(self, ranges: Iterable[tuple[int, int]]) -> TrainState:
        """The same, beyond ranges of samples (first, end) that the run is to pass over."""
        state = self
        for first, end in sorted(ranges):
            if first <= state.samples < end:
                state = replace(state, samples=end)
        return state

    def scalars(self) -> Scalars:
        """As a checkpoint's manifest keeps it."""
        scalars: Scalars = {
            "step": self.step,
            "samples": self.samples,
            "tokens": self.tokens,
            "skipped_steps": self.skipped_steps,
            "bad_steps": self.bad_steps,
            "losses": _text(self.losses),
            "grad_norms": _text(self.grad_norms),
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
        bad_steps=int(scalars.get("bad_steps", 0)),
        loss_scale=loss_scale,
        losses=_numbers(scalars.get("losses", "")),
        grad_norms=_numbers(scalars.get("grad_norms", "")),
    )


def _text(numbers: Iterable[float]) -> str:
    """Every digit, so that reading gives the same bits."""
    return " ".join(map(repr, numbers))


def _numbers(text: object) -> tuple[float, ...]:
    return tuple(map(float, str(text).split()))
