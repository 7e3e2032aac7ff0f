"""From a failure to the step that makes up for it: the numbers of a recovery."""

from __future__ import annotations

from dataclasses import dataclass, field

from raymega.events import Recovered, StateSource

PHASES = ("abort", "find", "reserve", "rendezvous", "build", "restore", "steps")
"""What a recovery passes through, in order; each ends where the next begins.

abort: survivors let go of the lost attempt. find: the newest state is looked for. reserve: there is a
process for each rank. rendezvous: every rank has met the others. build: model, optimizer and data
are there. restore: and hold the state. steps: what was lost is done again.
"""


@dataclass(kw_only=True, slots=True)
class RecoveryTimer:
    """A failure whose damage is not yet made good.

    Attributes:
        rank: Where it began; -1 when unknown.
        step: Completed steps when it was seen.
        seen_s: When it was seen, on the driver's clock.
        detection_s: From the last sign of progress to then.
        ended_s: When each of PHASES was over, the last time that it was.
    """

    rank: int
    step: int
    seen_s: float
    detection_s: float
    ended_s: dict[str, float] = field(default_factory=dict)

    def passed(self, phase: str, now_s: float) -> None:
        """``phase`` is over."""
        self.ended_s[phase] = now_s

    def is_over(self, step: int) -> bool:
        """``step`` completed steps are as many as there were, so nothing is lost any more."""
        return step >= self.step

    def recovered(
        self, *, step: int, restored_step: int, source: StateSource, now_s: float
    ) -> Recovered:
        """The event of its end: the run went from ``restored_step`` to ``step``."""
        self.passed("steps", now_s)
        return Recovered(
            rank=self.rank,
            step=step,
            restored_step=restored_step,
            lost_steps=max(0, self.step - restored_step),
            detection_s=self.detection_s,
            recovery_s=now_s - self.seen_s,
            source=source,
            phases=self._phases(),
        )

    def _phases(self) -> dict[str, float]:
        """Seconds of each; what a failed try took is part of the phase that it did not get through."""
        phases, since_s = {}, self.seen_s
        for phase in PHASES:
            ended_s = max(since_s, self.ended_s.get(phase, since_s))
            phases[phase], since_s = ended_s - since_s, ended_s
        return phases
