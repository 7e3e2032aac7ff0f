"""TrainState: progress of a run. Its sample counter is the only position in the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from raymega.config.schema import PrecisionSection
from raymega.optim.loss_scale import LossScale, first_loss_scale

Scalars = dict[str, int | float | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Scalars that are equal on all ranks and part of every checkpoint.

    Attributes:
        step: Number of completed steps.
        samples: Number of sequences consumed; the next step starts at this global sample.
        tokens: Number of unmasked tokens consumed.
        skipped_steps: Number of completed steps without an update: gradients overflowed float16,
            or the batch was left out.
        bad_steps: Number of consecutive batches left out up to here.
        loss_scale: Loss scale of the next step; None unless the dtype is float16.
        losses: Losses of the newest steps with an update, oldest first; basis of spike detection.
        grad_norms: Gradient norms of the same steps.
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
        """Number of parameter updates, on which learning rate and bias correction depend."""
        return self.step - self.skipped_steps

    def advance(
        self,
        *,
        samples: int,
        tokens: int,
        is_skipped: bool = False,
        loss_scale: LossScale | None = None,
    ) -> TrainState:
        """Return the state after one more step; ``loss_scale`` is that of the next step."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            skipped_steps=self.skipped_steps + is_skipped,
            loss_scale=loss_scale,
        )

    def remember(self, *, loss: float, grad_norm: float, window: int) -> TrainState:
        """Return the state with a good step's numbers; the newest ``window`` of them are kept."""
        losses, grad_norms = (*self.losses, loss), (*self.grad_norms, grad_norm)
        return replace(self, bad_steps=0, losses=losses[-window:], grad_norms=grad_norms[-window:])

    def past(self, ranges: Iterable[tuple[int, int]]) -> TrainState:
        """Return the state moved beyond any range of samples (first, end) that contains it."""
        state = self
        for first, end in sorted(ranges):
            # Ascending ranges, so that one that ends inside the next one leads beyond both.
            if first <= state.samples < end:
                state = replace(state, samples=end)
        return state

    def scalars(self) -> Scalars:
        """Return the state as scalars for a checkpoint's manifest."""
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
    """Return the state of a run before its first step."""
    return TrainState(loss_scale=first_loss_scale(precision))


def state_from(scalars: Mapping[str, int | float | str], precision: PrecisionSection) -> TrainState:
    """Return the state of a manifest's scalars; inverse of :meth:`TrainState.scalars`.

    A run that changes to float16 begins with the job's initial loss scale; one that leaves it drops
    the scale.

    Raises:
        KeyError: ``step``, ``samples``, ``tokens`` or a part of the loss scale is missing.
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
        # Checkpoints of older versions lack these.
        skipped_steps=int(scalars.get("skipped_steps", 0)),
        bad_steps=int(scalars.get("bad_steps", 0)),
        loss_scale=loss_scale,
        losses=_numbers(scalars.get("losses", "")),
        grad_norms=_numbers(scalars.get("grad_norms", "")),
    )


def _text(numbers: Iterable[float]) -> str:
    """Return numbers as text with all digits, so that reading restores the same bits."""
    return " ".join(map(repr, numbers))


def _numbers(text: object) -> tuple[float, ...]:
    return tuple(map(float, str(text).split()))
