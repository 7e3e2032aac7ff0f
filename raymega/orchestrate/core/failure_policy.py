"""Decides about a failure: restart the worker group, roll back, or give up; with a reason.

It only reads failures: it neither detects them nor carries out the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from raymega.config.elastic import ElasticSection
from raymega.errors import (
    CommunicationError,
    ConfigError,
    DataError,
    Fault,
    NumericsError,
    PlanError,
    RaymegaError,
    RollbackError,
    WorkerError,
)

MAX_EQUAL_ERRORS = 3
"""Number of equal errors in a row, at the same step, at which the run gives up."""

_HOPELESS: tuple[type[RaymegaError], ...] = (ConfigError, PlanError, DataError, NumericsError)
"""Errors that recur on every restart."""


class FailureKind(StrEnum):
    """Kinds of failure that end an attempt."""

    DIED = "died"
    """A worker's process or node is gone."""
    RAISED = "raised"
    """A worker's training thread raised."""
    HUNG = "hung"
    """No worker has made progress within the deadline, or some did not start in time."""
    UNSAVED = "unsaved"
    """Every worker is done, but the last checkpoint could not be written. The step must not be trained again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The root cause of a lost attempt.

    Attributes:
        kind: Kind of the failure.
        rank: Rank that failed first; -1 when it is unknown.
        step: Completed steps of that rank.
        error: Class name of the exception; empty unless one was raised.
        message: Description of the failure, in one line.
        traceback: Traceback in the worker; empty unless an exception was raised.
        exit_code: Exit code of the exception's class; 1 unless it is one of raymega's.
        next_sample: First sample to train on after a RollbackError; -1 to skip none.
    """

    kind: FailureKind
    rank: int
    step: int
    error: str = ""
    message: str
    traceback: str = ""
    exit_code: int = 1
    next_sample: int = -1

    @property
    def wants_rollback(self) -> bool:
        """True for a bad loss or gradient norm that the job answers with a rollback; no worker broke."""
        return self.error == RollbackError.__name__

    @property
    def headline(self) -> str:
        """Rank and kind of the failure, in a few words."""
        if self.kind is FailureKind.UNSAVED:
            return "the last save failed"
        who = "a worker" if self.rank < 0 else f"rank {self.rank}"
        return f"{who} raised {self.error}" if self.error else f"{who} {self.kind}"

    @property
    def cause(self) -> str:
        """Rank, kind and message of the failure, as one line for people."""
        return f"{self.headline}: {self.message}"

    def equals(self, other: Failure) -> bool:
        """Return whether both failures have the same kind, step and error, as a bug in training code has.

        Ranks are not compared: when every rank fails alike, any of them may be reported first.
        """
        mine = (self.kind, self.step, self.error)
        return mine == (other.kind, other.step, other.error)


def unsaved(*, step: int, saved_step: int, cause: str) -> Failure:
    """Return the failure of workers that completed ``step`` but whose checkpoint could not be written.

    ``cause`` is the store's error in a few words.
    """
    message = (
        f"every step is trained, but only step {saved_step} is saved: {cause or 'no rank told why'}"
    )
    return Failure(kind=FailureKind.UNSAVED, rank=-1, step=step, message=message)


class Action(StrEnum):
    """Answers of the controller to a failure."""

    RESTART = "restart"
    ROLL_BACK = "roll back"
    GIVE_UP = "give up"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """An action and the reason for it, as text."""

    action: Action
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FailurePolicy:
    """A policy of at most ``max_failures`` restarts, where they can help, and ``max_rollbacks`` rollbacks."""

    max_failures: int
    max_rollbacks: int = 0

    def decide(self, earlier: Sequence[Failure], failure: Failure) -> Decision:
        """Return the decision about ``failure``, given the ``earlier`` ones that count, oldest first."""
        if failure.wants_rollback:
            return self._roll_back(1 + sum(before.wants_rollback for before in earlier))
        # the last save was tried long enough; a restart would train the same steps again
        if failure.kind is FailureKind.UNSAVED:
            return _give_up(
                "the store had checkpoint.last_save_retry_s for it, and a restart would repeat steps"
            )
        # errors that no restart can help
        if failure.exit_code in {kind.exit_code for kind in _HOPELESS}:
            return _give_up(f"{failure.error} comes again however often the run restarts")
        repeats = 1 + _count_equal_at_end(earlier, failure)
        # a lost connection is a consequence of another rank's failure, so it does not count as a repeat
        is_own = failure.error != CommunicationError.__name__
        # a deterministic error: it recurred at the same step on every restart
        if failure.kind is FailureKind.RAISED and is_own and repeats >= MAX_EQUAL_ERRORS:
            return _give_up(f"the same error at step {failure.step}, {repeats} times in a row")
        # the retry budget
        number = _count_losses([*earlier, failure])
        if number > self.max_failures:
            return _give_up(f"elastic.max_failures={self.max_failures} restarts are spent")
        return Decision(
            action=Action.RESTART, reason=f"restart {number} of at most {self.max_failures}"
        )

    def _roll_back(self, number: int) -> Decision:
        """Return the decision about rollback ``number``; rollbacks have a budget apart from restarts."""
        if number > self.max_rollbacks:
            return _give_up(f"elastic.max_bad_steps={self.max_rollbacks} rollbacks are spent")
        reason = f"rollback {number} of at most {self.max_rollbacks}"
        return Decision(action=Action.ROLL_BACK, reason=reason)


def policy_of(section: ElasticSection) -> FailurePolicy:
    """Return the failure policy of a job's ``elastic`` section."""
    return FailurePolicy(max_failures=section.max_failures, max_rollbacks=section.max_bad_steps)


def give_up_error(failure: Failure, reason: str) -> RaymegaError:
    """Return the error that the driver raises, with the failure's exit code if that is 2 or 5, else 4."""
    # the same class where its name is known, else one with the same exit code
    akin = [kind for kind in _HOPELESS if kind.exit_code == failure.exit_code]
    name = NumericsError.__name__ if failure.wants_rollback else failure.error
    named = [kind for kind in akin if kind.__name__ == name]
    # WorkerError has exit code 4
    kinds: list[type[RaymegaError]] = [*named, *akin, WorkerError]
    does = "read that rank's log"
    if failure.kind is FailureKind.UNSAVED:
        does = "give the store room and the right to write, and start the same job again"
    remedy = f"{does}; the same job continues from the last checkpoint"
    return kinds[0](Fault(fact=failure.cause, rule=reason, remedy=remedy))


def _give_up(reason: str) -> Decision:
    return Decision(action=Action.GIVE_UP, reason=reason)


def _count_losses(failures: Sequence[Failure]) -> int:
    """Return the number of failures that use up a restart: no rollbacks, and each lost node once.

    A worker's death is known seconds before its node's. An attempt that starts in between may be placed on
    that node and die before ranks are assigned (rank -1); that second failure is not counted.
    """
    died = FailureKind.DIED
    echoes = sum(
        before.kind is died and before.rank >= 0 and after.kind is died and after.rank < 0
        for before, after in pairwise(failures)
    )
    return sum(not failure.wants_rollback for failure in failures) - echoes


def _count_equal_at_end(earlier: Sequence[Failure], failure: Failure) -> int:
    # failures in a row only: a different one in between starts the count anew
    count = 0
    for other in reversed(earlier):
        if not failure.equals(other):
            break
        count += 1
    return count
