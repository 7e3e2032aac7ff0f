"""From a failure to the step that makes up for it: the numbers of a recovery."""

from __future__ import annotations

from dataclasses import dataclass

from raymega.tracking.sink import Recovered, StateSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """A failure whose damage is not yet made good.

    Attributes:
        rank: Where it began; -1 when unknown.
        step: Completed steps when it was seen.
        seen_s: When it was seen, on the driver's clock.
        detection_s: From the last sign of progress to then.
    """

    rank: int
    step: int
    seen_s: float
    detection_s: float

    def is_over(self, step: int) -> bool:
        """``step`` completed steps are as many as there were, so nothing is lost any more."""
        return step >= self.step

    def recovered(
        self, *, attempt: int, step: int, restored_step: int, source: StateSource, now_s: float
    ) -> Recovered:
        """The event of its end: ``attempt`` went from ``restored_step`` to ``step``."""
        return Recovered(
            attempt=attempt,
            rank=self.rank,
            step=step,
            restored_step=restored_step,
            lost_steps=max(0, self.step - restored_step),
            detection_s=self.detection_s,
            recovery_s=now_s - self.seen_s,
            source=source,
        )
