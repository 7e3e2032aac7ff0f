"""Records the failures of one driver, times the recovery under way, and counts goodput.

It only counts and measures. ``core/failure_policy.py`` decides about a failure, and the controller acts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from raymega.events import Recovered, StateSource
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.core.failure_policy import Decision, Failure, FailurePolicy

PHASES = ("abort", "find", "reserve", "rendezvous", "build", "restore", "steps")
"""Phases of a recovery in order; each ends where the next begins.

abort: the survivors' threads of the lost attempt end. find: the newest state is found. reserve: there is a
process for each rank. rendezvous: every rank has joined. build: model, optimizer and data are built.
restore: they hold the state. steps: the lost steps are done again.
"""
PHASE_OF = {"rendezvous": "rendezvous", "built": "build", "restored": "restore"}
"""Phase of a recovery by the phase that workers report in Entered."""


@dataclass(kw_only=True, slots=True)
class _Recovery:
    """A failure whose lost steps are not yet done again.

    Attributes:
        rank: Rank that failed first; -1 when unknown.
        step: Completed steps when it was noticed.
        noticed_s: Time at which it was noticed, in seconds of the driver's clock.
        detection_s: Time from the last sign of progress to ``noticed_s``, in seconds.
        ended_s: Last end of each of PHASES, in seconds of the driver's clock.
        back_at: Completed steps with which it is over.
    """

    rank: int
    step: int
    noticed_s: float
    detection_s: float
    back_at: int
    ended_s: dict[str, float] = field(default_factory=dict)

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase; a failed attempt's time counts to the phase that it did not pass."""
        phases, since_s = {}, self.noticed_s
        for phase in PHASES:
            ended_s = max(since_s, self.ended_s.get(phase, since_s))
            phases[phase], since_s = ended_s - since_s, ended_s
        return phases


class RecoveryLog:
    """Failures, oldest first, the phases of the present recovery, and the times of steps that count.

    Goodput counts a step once, and only if its result survives. Steps that a failure undid, starts, restores,
    saves and waits do not count.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        clock: Clock,
        *,
        first_step: int,
        earlier: Sequence[Failure] = (),
    ) -> None:
        """Start the clock of a driver whose run has ``first_step`` completed steps.

        ``earlier`` are the failures of previous drivers that did not end in good order, oldest first. They
        count against the policy's budgets too.
        """
        self._policy, self._clock = policy, clock
        self._failures = list(earlier)
        self._recovery: _Recovery | None = None
        self._begun_s = clock.monotonic()
        self._first_step = self._restored_step = first_step
        self._source: StateSource = "nothing"
        self._step_times_s = array("d")

    def decide(self, failure: Failure) -> Decision:
        """Record one more failure, and return the policy's decision."""
        decision = self._policy.decide(self._failures, failure)
        self._failures.append(failure)
        return decision

    def begin(self, failure: Failure, *, step: int, last_sign_s: float) -> None:
        """Start a recovery from ``failure`` after ``step`` completed steps, unless one is under way.

        A failure during a recovery does not start another. ``last_sign_s`` is the time of the attempt's last
        sign of progress.
        """
        if self._recovery is None:
            now_s = self._clock.monotonic()
            self._recovery = _Recovery(
                rank=failure.rank, step=step, noticed_s=now_s, detection_s=now_s - last_sign_s,
                back_at=step,
            )  # fmt: skip

    def passed(self, phase: str) -> None:
        """Record the end of one of PHASES, if a recovery is under way."""
        if self._recovery is not None:
            self._recovery.ended_s[phase] = self._clock.monotonic()

    def go_back(self, step: int, *, source: StateSource) -> None:
        """Discard the steps after ``step``, from which the next attempt continues."""
        # undone steps are no goodput
        del self._step_times_s[max(0, step - self._first_step) :]
        self._first_step = min(self._first_step, step)
        self._restored_step, self._source = step, source
        # back is a run that has made a step: where none was lost, the next one
        if self._recovery is not None:
            self._recovery.back_at = max(self._recovery.step, step + 1)

    def add_step(self, step: int, *, seconds: float) -> Recovered | None:
        """Count a step that took ``seconds``; return the recovery's event if it was the last lost step.

        ``step`` is the number of completed steps with it.
        """
        self._step_times_s.append(seconds)
        recovery = self._recovery
        if recovery is None or step < recovery.back_at:
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
        """Return the share of ``wall_s`` seconds spent in steps that count, from 0 to 1; 0 at the start."""
        return min(1.0, sum(self._step_times_s) / wall_s) if wall_s > 0 else 0.0
