"""The states of a run and the moves between them: the driver's whole life on one page.

It decides nothing and touches nothing: the controller moves, this page says which moves exist.

    SCHEDULING -> STARTING -> RUNNING -> FINISHED
        ^            |           |
        +-- RESTARTING <---------+-> STOPPING -> PREEMPTED

A failure leads to FAILED from everywhere, and a request to stop to PREEMPTED.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from raymega.errors import Fault, InternalError


class State(StrEnum):
    """Where a run is; the last three are ends."""

    SCHEDULING = "scheduling"
    """Waits for the cluster's slots; no worker of the attempt lives yet."""
    STARTING = "starting"
    """Workers start and meet each other."""
    RUNNING = "running"
    """Workers build, restore and step; saves are written and committed meanwhile."""
    STOPPING = "stopping"
    """Workers were asked to finish their step and save."""
    RESIZING = "resizing"
    """Workers were asked to finish their step and save: a larger grid takes over, or other nodes."""
    RESTARTING = "restarting"
    """The attempt is over and is cleared away; survivors keep their processes."""
    FINISHED = "finished"
    """Every step is done and the last checkpoint is committed."""
    FAILED = "failed"
    """The driver gave up; the reason says why."""
    PREEMPTED = "preempted"
    """Stopped in good order before the end; the same job continues the run."""

    @property
    def is_end(self) -> bool:
        """No move leads out of it."""
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
"""From each state, where it may go. SCHEDULING goes to FINISHED when no step is left to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """A run at one moment, as its driver sees it.

    Attributes:
        state: Where it is.
        attempt: Number of the worker group at work or about to start, from 1.
        step: Completed steps of the present attempt; a restart takes it back to ``saved_step``.
        saved_step: Step of the newest committed checkpoint that the run can restore; 0 for none.
        since_s: When ``state`` was entered, on the driver's monotonic clock.
        reason: Why it was entered, a few words.
    """

    state: State = State.SCHEDULING
    attempt: int
    step: int
    saved_step: int
    since_s: float
    reason: str

    def move(self, to: State, *, now_s: float, reason: str = "") -> RunState:
        """The same run in state ``to``.

        Raises:
            InternalError: TRANSITIONS has no such move.
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
