"""What to do about a failure, as a value: restart the worker group, or give up and say why.

It reads only failures; it neither detects them nor acts on its own decision.
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
"""The same error at the same step so often is no accident."""

_HOPELESS: tuple[type[RaymegaError], ...] = (ConfigError, PlanError, DataError, NumericsError)
"""Errors that come again however often the run restarts."""


class FailureKind(StrEnum):
    """How an attempt was lost."""

    DIED = "died"
    """A worker's process or node is gone."""
    RAISED = "raised"
    """A worker's training thread raised."""
    HUNG = "hung"
    """No worker has made progress within the deadline, or some did not start in time."""
    UNSAVED = "unsaved"
    """Every worker is done, but the last checkpoint could not be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The first cause of a lost attempt.

    Attributes:
        kind: How it was lost.
        rank: Where it began; -1 when nobody knows.
        step: Completed steps of that rank.
        error: Class name of the exception; empty unless something was raised.
        message: What happened, one line.
        traceback: The worker's own; empty unless something was raised.
        exit_code: The error's own; 1 unless it is one of raymega's.
        next_sample: Of a RollbackError, where the data go on; -1 where they left off.
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
        """Nobody broke: the numbers are no good, and the job goes back for it."""
        return self.error == RollbackError.__name__

    @property
    def headline(self) -> str:
        """A few words: who and how."""
        who = "a worker" if self.rank < 0 else f"rank {self.rank}"
        return f"{who} raised {self.error}" if self.error else f"{who} {self.kind}"

    @property
    def cause(self) -> str:
        """One line for people: who, how and why."""
        return f"{self.headline}: {self.message}"

    def equals(self, other: Failure) -> bool:
        """Same step, same error: the training code does it again.

        The rank does not matter: when all ranks make the same mistake, any may be heard first.
        """
        mine = (self.kind, self.step, self.error)
        return mine == (other.kind, other.step, other.error)


def unsaved(*, step: int, saved_step: int) -> Failure:
    """All workers have left their loop at ``step``, and its checkpoint could not be written."""
    message = f"the workers are done, but only step {saved_step} is saved"
    return Failure(kind=FailureKind.UNSAVED, rank=-1, step=step, message=message)


class Action(StrEnum):
    """What the controller can do about a failure."""

    RESTART = "restart"
    ROLL_BACK = "roll back"
    GIVE_UP = "give up"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """An action and the sentence that explains it."""

    action: Action
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FailurePolicy:
    """Restart ``max_failures`` times, unless restarting cannot help; go back ``max_rollbacks`` times."""

    max_failures: int
    max_rollbacks: int = 0

    def decide(self, earlier: Sequence[Failure], failure: Failure) -> Decision:
        """Weigh ``failure`` against the ``earlier`` ones of this driver, oldest first."""
        if failure.wants_rollback:
            return self._roll_back(1 + sum(before.wants_rollback for before in earlier))
        if failure.exit_code in {kind.exit_code for kind in _HOPELESS}:
            return _give_up(f"{failure.error} comes again however often the run restarts")
        repeats = 1 + _count_equal_at_end(earlier, failure)
        is_own = failure.error != CommunicationError.__name__  # else it is what others did to it
        if failure.kind is FailureKind.RAISED and is_own and repeats >= MAX_EQUAL_ERRORS:
            return _give_up(f"the same error at step {failure.step}, {repeats} times in a row")
        number = _count_losses([*earlier, failure])
        if number > self.max_failures:
            return _give_up(f"elastic.max_failures={self.max_failures} restarts are spent")
        return Decision(
            action=Action.RESTART, reason=f"restart {number} of at most {self.max_failures}"
        )

    def _roll_back(self, number: int) -> Decision:
        """A budget of its own: that is no fault of a machine."""
        if number > self.max_rollbacks:
            return _give_up(f"elastic.max_bad_steps={self.max_rollbacks} rollbacks are spent")
        reason = f"rollback {number} of at most {self.max_rollbacks}"
        return Decision(action=Action.ROLL_BACK, reason=reason)


def policy_of(section: ElasticSection) -> FailurePolicy:
    """What a job says."""
    return FailurePolicy(max_failures=section.max_failures, max_rollbacks=section.max_bad_steps)


def give_up_error(failure: Failure, reason: str) -> RaymegaError:
    """What the driver raises: the error's own kind when that asks for an exit code, else 4."""
    akin = [kind for kind in _HOPELESS if kind.exit_code == failure.exit_code]
    name = NumericsError.__name__ if failure.wants_rollback else failure.error
    named = [kind for kind in akin if kind.__name__ == name]
    kinds: list[type[RaymegaError]] = [*named, *akin, WorkerError]
    remedy = "read that rank's log; the same job continues from the last checkpoint"
    return kinds[0](Fault(fact=failure.cause, rule=reason, remedy=remedy))


def _give_up(reason: str) -> Decision:
    return Decision(action=Action.GIVE_UP, reason=reason)


def _count_losses(failures: Sequence[Failure]) -> int:
    """Failures, less the echoes of a lost node.

    A worker's death is known seconds before its node's. An attempt that starts in between may be
    placed on that node, and dies before anybody has a rank: that is the same loss.
    """
    died = FailureKind.DIED
    echoes = sum(
        before.kind is died and before.rank >= 0 and after.kind is died and after.rank < 0
        for before, after in pairwise(failures)
    )
    return sum(not failure.wants_rollback for failure in failures) - echoes


def _count_equal_at_end(earlier: Sequence[Failure], failure: Failure) -> int:
    count = 0
    for other in reversed(earlier):
        if not failure.equals(other):
            break
        count += 1
    return count
