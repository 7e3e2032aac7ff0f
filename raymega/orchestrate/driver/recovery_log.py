"""The book of one driver: what failed so far, the recovery that is under way, and the steps that count.

It counts and measures. What to do about a failure is failure_policy's, and doing it the controller's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from raymega.events import Recovered, StateSource
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.core.failure_policy import Decision, Failure, FailurePolicy

PHASES = ("abort", "find", "reserve", "rendezvous", "build", "restore", "steps")
"""What a recovery passes through, in order; each ends where the next begins.

abort: survivors let go of the lost attempt. find: the newest state is looked for. reserve: there is a
process for each rank. rendezvous: every rank has met the others. build: model, optimizer and data
are there. restore: and hold the state. steps: what was lost is done again.
"""
PHASE_OF = {"rendezvous": "rendezvous", "built": "build", "restored": "restore"}
"""Phases of a recovery by those that workers report."""


@dataclass(kw_only=True, slots=True)
class _Recovery:
    """A failure whose damage is not yet made good.

    Attributes:
        rank: Where it began; -1 when unknown.
        step: Completed steps when it was noticed.
        noticed_s: When that was, on the driver's clock.
        detection_s: From the last sign of progress to then.
        ended_s: When each of PHASES was over, the last time that it was.
    """

    rank: int
    step: int
    noticed_s: float
    detection_s: float
    ended_s: dict[str, float] = field(default_factory=dict)

    def phases(self) -> dict[str, float]:
        """Seconds of each; what a failed try took is part of the phase that it did not get through."""
        phases, since_s = {}, self.noticed_s
        for phase in PHASES:
            ended_s = max(since_s, self.ended_s.get(phase, since_s))
            phases[phase], since_s = ended_s - since_s, ended_s
        return phases


class RecoveryLog:
    """Failures, oldest first, the stop watch of the present recovery, and the surviving history's steps.

    A step counts once, and only if its result is part of the history that survives: steps that a failure
    made to be done again, starting, restoring, saving and waiting are no goodput.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        clock: Clock,
        *,
        first_step: int,
        earlier: Sequence[Failure] = (),
    ) -> None:
        """The driver takes up the run now, with ``first_step`` completed steps.

        ``earlier`` are failures of drivers that were torn away, oldest first: they count, too.
        """
        self._policy, self._clock = policy, clock
        self._failures = list(earlier)
        self._recovery: _Recovery | None = None
        self._begun_s = clock.monotonic()
        self._first_step = self._restored_step = first_step
        self._source: StateSource = "nothing"
        self._step_times_s = array("d")

    def decide(self, failure: Failure) -> Decision:
        """What follows from one more failure."""
        decision = self._policy.decide(self._failures, failure)
        self._failures.append(failure)
        return decision

    def begin(self, failure: Failure, *, step: int, last_sign_s: float) -> None:
        """An attempt is lost after ``step`` steps; if the one before never got as far as its loss, that
        recovery goes on. ``last_sign_s`` is when the attempt was last seen to progress."""
        if self._recovery is None:
            now_s = self._clock.monotonic()
            self._recovery = _Recovery(
                rank=failure.rank, step=step, noticed_s=now_s, detection_s=now_s - last_sign_s
            )

    def passed(self, phase: str) -> None:
        """One of PHASES is over, if there is a recovery."""
        if self._recovery is not None:
            self._recovery.ended_s[phase] = self._clock.monotonic()

    def go_back(self, step: int, *, source: StateSource) -> None:
        """The history after ``step`` completed steps is lost: the next attempt goes on from there."""
        del self._step_times_s[max(0, step - self._first_step) :]
        self._first_step = min(self._first_step, step)
        self._restored_step, self._source = step, source

    def add_step(self, step: int, *, seconds: float) -> Recovered | None:
        """``step`` steps are complete, the last in ``seconds``; the event of the recovery's end, if that
        makes up for all that was lost."""
        self._step_times_s.append(seconds)
        recovery = self._recovery
        if recovery is None or step < recovery.step:
            return None
        self.passed("steps")
        self._recovery = None
        return Recovered(
            rank=recovery.rank,
            step=step,
            restored_step=self._restored_step,
            lost_steps=max(0, recovery.step - self._restored_step),
            detection_s=recovery.detection_s,
            recovery_s=recovery.ended_s["steps"] - recovery.noticed_s,
            source=self._source,
            phases=recovery.phases(),
        )

    @property
    def wall_s(self) -> float:
        """Seconds since the driver took up the run."""
        return self._clock.monotonic() - self._begun_s

    def goodput(self, wall_s: float) -> float:
        """Share of ``wall_s`` that went into steps that count, from 0 to 1; 0 before any time has passed."""
        return min(1.0, sum(self._step_times_s) / wall_s) if wall_s > 0 else 0.0
