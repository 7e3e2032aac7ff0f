"""The losses of one driver: what failed so far, and the outage that is not yet made good.

It counts and measures. What to do about a failure is policies', and doing it the controller's.
"""

from __future__ import annotations

from collections.abc import Sequence

from raymega.events import Recovered, StateSource
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.core.failure_policy import Decision, Failure, FailurePolicy
from raymega.orchestrate.driver.attempt_monitor import AttemptMonitor
from raymega.orchestrate.driver.recovery_timer import RecoveryTimer

PHASE_OF = {"rendezvous": "rendezvous", "built": "build", "restored": "restore"}
"""Phases of a recovery by those that workers report."""


class FailureHistory:
    """Failures, oldest first, and the stop watch of the present outage."""

    def __init__(
        self, policy: FailurePolicy, clock: Clock, *, earlier: Sequence[Failure] = ()
    ) -> None:
        """``earlier`` are those of drivers that were torn away, oldest first: they count, too."""
        self._policy, self._clock = policy, clock
        self._failures = list(earlier)
        self._recovery: RecoveryTimer | None = None

    def decide(self, failure: Failure) -> Decision:
        """What follows from one more failure."""
        decision = self._policy.decide(self._failures, failure)
        self._failures.append(failure)
        return decision

    def begin(self, failure: Failure, attempt: AttemptMonitor) -> None:
        """``attempt`` is lost; when the one before never got as far as its loss, that goes on."""
        now_s = self._clock.monotonic()
        if self._recovery is None:
            detection_s = now_s - attempt.last_sign_s
            self._recovery = RecoveryTimer(
                rank=failure.rank, step=attempt.step, seen_s=now_s, detection_s=detection_s
            )

    def mark(self, phase: str) -> None:
        """A phase of the recovery is over, if there is a recovery; see outage.PHASES."""
        if self._recovery is not None:
            self._recovery.passed(phase, self._clock.monotonic())

    def mark_start(self, phase: str, attempt: AttemptMonitor) -> None:
        """A rank has passed a phase of its start; the last one ends a phase of the recovery."""
        if attempt.has_passed(phase):
            self.mark(PHASE_OF[phase])

    def end(self, attempt: AttemptMonitor, *, step: int, source: StateSource) -> Recovered | None:
        """The event of the outage's end, when ``step`` completed steps make up for it."""
        if self._recovery is None or not self._recovery.is_over(step):
            return None
        recovery, self._recovery = self._recovery, None
        return recovery.recovered(
            step=step,
            restored_step=attempt.first_step,
            source=source,
            now_s=self._clock.monotonic(),
        )
