"""What the controller tells the sink, built from what it knows. Pure; it emits nothing."""

from __future__ import annotations

from collections.abc import Mapping

from raymega.errors import LeaseError
from raymega.messages import Evaluated, NodesChecked, StepDone, StepDoubted
from raymega.orchestrate.core.failure_policy import Failure
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.state import RunState, State
from raymega.orchestrate.driver.checkpoint_committer import Committed, Refused
from raymega.orchestrate.driver.goodput import GoodputMeter
from raymega.orchestrate.run_store.journal import RunRecord
from raymega.plan.run_plan import RunPlan
from raymega.tracking.sink import (
    AttemptStarted,
    CheckpointCommitted,
    DoubtSeen,
    EvaluationFinished,
    FailureSeen,
    NodesPassed,
    RunFinished,
    RunStarted,
    RunStatus,
    SaveFailed,
    StateSource,
    StepFinished,
    WorkersStarted,
)

_STATUS: dict[State, RunStatus] = {State.FINISHED: "finished", State.PREEMPTED: "preempted"}


def run_started(plan: RunPlan, record: RunRecord, state: RunState, *, uri: str) -> RunStarted:
    """The driver took up the run."""
    return RunStarted(
        run_id=record.run_id,
        name=record.name,
        uri=uri,
        is_resumed=record.num_attempts > 0,
        step=state.saved_step,
        total_steps=plan.job.run.steps,
        job=plan.job.model_dump(mode="json"),
    )


def attempt_started(plan: RunPlan, state: RunState, *, source: StateSource) -> AttemptStarted:
    """A worker group is about to start."""
    return AttemptStarted(
        attempt=state.attempt,
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


def workers_started(state: RunState, members: Mapping[int, WorkerLocation]) -> WorkersStarted:
    """Every worker lives."""
    ranks = sorted(members)
    return WorkersStarted(
        attempt=state.attempt,
        pids={rank: members[rank].pid for rank in ranks},
        nodes={rank: members[rank].node_id for rank in ranks},
    )


def step_finished(state: RunState, report: StepDone, *, spares: int, age_s: float) -> StepFinished:
    """One more step; the driver's lease was confirmed ``age_s`` ago."""
    metrics = report.metrics | {"run/spares": float(spares), "run/lease_age_s": age_s}
    return StepFinished(attempt=state.attempt, step=report.step, metrics=metrics)


def of_report(
    state: RunState, report: Evaluated | NodesChecked | StepDoubted
) -> EvaluationFinished | NodesPassed | DoubtSeen:
    """What one rank says for all, or one worker for its node, as it is."""
    attempt = state.attempt
    if isinstance(report, Evaluated):
        return EvaluationFinished(attempt=attempt, step=report.step, metrics=report.metrics)
    if isinstance(report, NodesChecked):
        return NodesPassed(attempt=attempt, seconds=report.seconds, detail=report.detail)
    return DoubtSeen(
        attempt=attempt, step=report.step, kind=report.kind, fact=report.fact, where=report.where,
        action=report.action,
    )  # fmt: skip


def checkpoint_committed(state: RunState, commit: Committed) -> CheckpointCommitted:
    """A checkpoint exists."""
    return CheckpointCommitted(
        attempt=state.attempt,
        step=commit.step,
        uri=commit.uri,
        stall_s=commit.stall_s,
        save_s=commit.save_s,
        num_bytes=commit.num_bytes,
    )


def save_failed(state: RunState, refusal: Refused) -> SaveFailed:
    """A checkpoint does not exist."""
    return SaveFailed(attempt=state.attempt, step=refusal.step, reason=refusal.reason)


def failure_seen(
    state: RunState, failure: Failure, *, decision: str, whereabouts: Mapping[int, str]
) -> FailureSeen:
    """The attempt is lost."""
    return FailureSeen(
        attempt=state.attempt, rank=failure.rank, step=failure.step, cause=failure.cause,
        is_rollback=failure.wants_rollback, decision=decision, whereabouts=whereabouts,
    )  # fmt: skip


def run_finished(
    state: RunState,
    meter: GoodputMeter,
    *,
    error: Exception | None,
    checkpoint_uri: str,
    now_s: float,
) -> RunFinished:
    """The driver is done; a state that is no end means that it was torn away."""
    is_lost = isinstance(error, LeaseError)
    return RunFinished(
        status="superseded" if is_lost else _STATUS.get(state.state, "failed"),
        step=state.saved_step,
        checkpoint_uri=checkpoint_uri,
        goodput=meter.goodput(now_s),
        wall_s=meter.wall_s(now_s),
        reason=state.reason if state.state.is_end else f"interrupted while {state.state}",
    )
