"""Events of an attempt's start and of a driver's end, and the error of a stopped run, from the run's state."""

from __future__ import annotations

from raymega.errors import LeaseError, PreemptedError, RaymegaError
from raymega.events import AttemptStarted, RunFinished, RunStatus, StateSource
from raymega.orchestrate.core.state import RunState, State
from raymega.orchestrate.driver.recovery_log import RecoveryLog
from raymega.orchestrate.run_store.journal import RunRecord
from raymega.plan.run_plan import RunPlan

STATUS: dict[State, RunStatus] = {State.FINISHED: "finished", State.PREEMPTED: "preempted"}
"""Status of a run by its final state; "failed" or "interrupted" for every other."""


def attempt_event(state: RunState, plan: RunPlan, *, source: StateSource) -> AttemptStarted:
    """Return the event of an attempt that starts with ``state``, which comes from ``source``, on the grid of ``plan``."""
    return AttemptStarted(
        step=state.step,
        source=source,
        grid=plan.grid.degrees(),
        plan={
            "world_size": plan.grid.world_size,
            "num_micro_batches": plan.batch.num_micro_batches,
            "schedule": plan.job.schedule.name,
        },
        reason=state.reason,
    )


def finished_event(
    state: RunState, error: RaymegaError | None, *, uri: str, recovery_log: RecoveryLog
) -> RunFinished:
    """Return the final event of a driver.

    Args:
        state: Last state of the run.
        error: Error with which the driver gave up; None if it did not.
        uri: URI of the newest checkpoint; empty without one.
        recovery_log: Times of the driver, for goodput.
    """
    wall_s = recovery_log.wall_s
    status = STATUS.get(state.state, "failed" if error else "interrupted")
    return RunFinished(
        status="superseded" if isinstance(error, LeaseError) else status,
        step=state.saved_step,
        checkpoint_uri=uri,
        goodput=recovery_log.goodput(wall_s),
        wall_s=wall_s,
        reason=state.reason if state.state.is_end else state.interruption,
    )


def stopped(record: RunRecord, state: RunState) -> PreemptedError:
    """Return the error of a run that was stopped by request and can be continued."""
    return PreemptedError(
        fact=f"run {record.name!r} stopped with step {state.saved_step} of {record.total_steps} "
        f"saved ({state.reason})",
        rule="a run that is stopped can be continued",
        remedy="start the same job again",
    )
