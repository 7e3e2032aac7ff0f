"""TrainState: where a run stands. Its sample counter is the only position in the data there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Scalars that all ranks share and every checkpoint carries.

    Attributes:
        step: Completed optimizer steps.
        samples: Sequences consumed; the next step starts at this global sample.
        tokens: Unmasked tokens consumed.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0

    def advance(self, *, samples: int, tokens: int) -> TrainState:
        """The state after one more optimizer step."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
        )

    def scalars(self) -> dict[str, int | float | str]:
        """As a checkpoint's manifest keeps it."""
        return {"step": self.step, "samples": self.samples, "tokens": self.tokens}


def state_from(scalars: Mapping[str, int | float | str]) -> TrainState:
    """Inverse of :meth:`TrainState.scalars`; raises KeyError when one is missing."""
    return TrainState(**{name: int(scalars[name]) for name in ("step", "samples", "tokens")})
