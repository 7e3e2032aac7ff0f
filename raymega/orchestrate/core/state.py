"""The states of a run and the legal transitions between them.

This module is data only: ``orchestrate/driver/controller.py`` decides on each transition.

    SCHEDULING -> STARTING -> RUNNING -> FINISHED
        ^            |           |
        +-- RESTARTING <---------+-> STOPPING -> PREEMPTED
                ^----- RESIZING <+

Every state but the last three may lead to FAILED. A request to stop leads to PREEMPTED.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from raymega.errors import Fault, InternalError


class State(StrEnum):
    """State of a run; the last three are final."""

    SCHEDULING = "scheduling"
    """The driver waits for worker slots; no worker of the attempt runs yet."""
    STARTING = "starting"
    """Workers start and join the rendezvous."""
    RUNNING = "running"
    """Workers build, restore and step; saves are written and committed in the background."""
    STOPPING = "stopping"
    """Workers were asked to finish their step and save."""
    RESIZING = "resizing"
    """Workers were asked to finish their step and save, to continue on a larger grid or on other nodes."""
    RESTARTING = "restarting"
    """The attempt is over and is aborted; surviving workers keep their processes."""
    FINISHED = "finished"
    """Every step is done and the last checkpoint is committed."""
    FAILED = "failed"
    """The driver gave up; ``RunState.reason`` says why."""
    PREEMPTED = "preempted"
    """The run was stopped before its last step; the same job continues it."""

    @property
    def is_end(self) -> bool:
        """True for a final state, which has no transition to another."""
        return not TRANSITIONS[self]


TRANSITIONS: dict[State, frozenset[State]] = {
    State.SCHEDULING: frozenset({State.STARTING, State.FINISHED, State.PREEMPTED, State.FAILED}),
    State.STARTING: frozenset({State.RUNNING, State.RESTARTING, State.PREEMPTED, State.FAILED}),
    State.RUNNING: frozenset(
        {State.STOPPING, State.RESIZING, State.RESTARTING, State.FINISHED, State.FAILED}
    ),
    State.RESIZING: frozenset({State.STOPPING, State.RESTARTING, State.FINISHED, State.FAILED}),
    State.STOPPING: frozenset({State.RESTARTING, State.FINISHED, State.PREEMPTED, State.FAILED}),
    State.RESTARTING: frozenset({State.SCHEDULING, State.PREEMPTED, State.FAILED}),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.PREEMPTED: frozenset(),
}
"""The legal next states of each state. SCHEDULING leads to FINISHED when no step is left to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """A run at one moment, as its driver sees it.

    Attributes:
        state: State of the run.
        attempt: Number of the worker group at work or about to start, from 1.
        step: Completed steps of the present attempt; a restart takes it back to ``saved_step``.
        saved_step: Step of the newest committed checkpoint that the run can restore; 0 for none.
        since_s: Time at which ``state`` was entered, in seconds of the driver's monotonic clock.
        reason: Cause of the transition into ``state``, in a few words.
    """

    state: State = State.SCHEDULING
    attempt: int
    step: int
    saved_step: int
    since_s: float
    reason: str

    @property
    def interruption(self) -> str:
        """An end of the driver in this state, in words, with the steps that it loses."""
        lost = self.step - self.saved_step
        cost = f" at step {self.step}; {lost} of its steps are not saved" if lost > 0 else ""
        return f"interrupted while {self.state}{cost}"

    def move(self, to: State, *, now_s: float, reason: str = "") -> RunState:
        """Return the same run in state ``to``.

        Raises:
            InternalError: TRANSITIONS does not allow it.
        """
        if to not in TRANSITIONS[self.state]:
            raise InternalError(_no_such_move(self.state, to))
        return replace(self, state=to, since_s=now_s, reason=reason)


def _no_such_move(here: State, to: State) -> Fault:
    legal = ", ".join(sorted(TRANSITIONS[here])) or "nowhere"
    return Fault(
        fact=f"a run that is {here} was moved to {to}",
        rule=f"from {here} it may go to {legal}",
        remedy="correct the controller, or add the move to TRANSITIONS",
    )
