"""The run of one driver: its state, attempt and records, and the actions of the control loop.

It handles reports and commits, begins and aborts attempts, and emits events. The controller decides when.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from itertools import chain

from raymega.errors import LeaseError, RaymegaError, counted
from raymega.events import (
    AttemptEvent,
    AttemptFailed,
    BadStep,
    CheckpointCommitted,
    EvaluationFinished,
    ExpertLoads,
    Measured,
    NodesChecked,
    RunFinished,
    RunStarted,
    SamplesDrawn,
    SaveFailed,
    SaveSkipped,
    StepFinished,
    WorkersStarted,
)
from raymega.messages import Entered, EntryOutput, RankMemory, RankTimeline, Report
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.core.failure_policy import (
    Action,
    Failure,
    give_up_error,
    policy_of,
    unsaved,
)
from raymega.orchestrate.core.state import State
from raymega.orchestrate.core.worker_group_api import AttemptSpec, WorkerGroup, WorkerStatus
from raymega.orchestrate.driver.attempt_monitor import AttemptMonitor, is_sign_of_life
from raymega.orchestrate.driver.checkpoint_committer import CheckpointCommitter, Superseded
from raymega.orchestrate.driver.rank_reports import RankReports
from raymega.orchestrate.driver.recovery_log import PHASE_OF, RecoveryLog
from raymega.orchestrate.driver.replicas import ReplicaRecovery
from raymega.orchestrate.driver.restore_point import RestorePoint
from raymega.orchestrate.driver.run_events import attempt_event, finished_event, stopped
from raymega.orchestrate.driver.scaling_policy import ScalingPolicy
from raymega.orchestrate.driver.spares import SpareWatch
from raymega.orchestrate.driver.task_scores import TaskScores
from raymega.orchestrate.run_store.journal import Journal
from raymega.orchestrate.run_store.lease import Lease
from raymega.plan.run_plan import RunPlan
from raymega.tracking.names import check_names
from raymega.tracking.sink import Sink

log = logging.getLogger(__name__)

TICK_S = 0.25
"""Longest wait for reports in one tick, in seconds; a stop request waits as long."""
DRAIN_S = 30.0
"""Longest wait for a pending commit before a restart looks for the newest checkpoint, in seconds."""


class RunContext:
    """The run of one driver; called from the control loop's thread only.

    ``job``, ``lease``, ``group`` and ``clock`` are as given.

    Attributes:
        state: State of the run, with its attempt and steps.
        grids: Plans of the present grid and of the job's own.
        replicas: State that the workers hold in their own memory.
        attempt: Progress and failure of the present attempt.
        committer: Saves of the present attempt.
        recovery_log: Failures so far, the recovery under way, and goodput.
        error: Error with which the driver gave up; None if it did not.
    """

    def __init__(  # noqa: PLR0913  # the api is the one place that calls it
        self,
        plan: RunPlan,
        *,
        lease: Lease,
        group: WorkerGroup,
        sink: Sink,
        clock: Clock,
        executor: Executor,
        tasks: TaskScores | None = None,
    ) -> None:
        """Read the run's journal and find its newest state; nothing is started or written.

        Args:
            plan: Plan of the run on the job's own grid.
            lease: Lease on the run, with its store; this driver holds it, and another thread renews it.
            group: Workers; released when the run ends.
            sink: Receiver of every event; must not raise and not block.
            clock: Clock for deadlines and durations.
            executor: Executor with one thread for writes to the store; it is not shut down here.
            tasks: Evaluation tasks that the workers score; None for none.

        Raises:
            ConfigError: The store holds a run of this name with another model, seed or data.
            CheckpointError: The run has checkpoints, and none can be restored.
        """
        self.job, self.lease = plan.job, lease
        self._store, self.group, self._sink = lease.store, group, sink
        self.clock, self._executor, self._tasks = clock, executor, tasks
        self._journal = Journal(plan.job, lease=lease, executor=executor, clock=clock)
        # what earlier drivers left: workers, failures, and the state to start from
        self.grids = ScalingPolicy(plan, num_before=self._journal.past.num_workers)
        self._restore = RestorePoint(lease.store, plan.job, group.snapshot_manager)
        self.error: RaymegaError | None = None
        self.replicas = ReplicaRecovery(self.grids, self._restore, group)
        self._spares = SpareWatch(plan.job.elastic.spares)
        self.state = self._journal.first_state()
        self._find_state()
        if self._restore.start.key and not self._journal.record.num_attempts:
            self.state = replace(self.state, reason="resumed from an existing checkpoint")
        self.recovery_log = RecoveryLog(
            policy_of(plan.job.elastic),
            clock,
            first_step=self.state.step,
            earlier=self._journal.past.failures,
        )
        self._forget_attempt()

    @property
    def seconds_here(self) -> float:
        """Seconds since the present state was entered."""
        return self.clock.monotonic() - self.state.since_s

    @property
    def is_done(self) -> bool:
        """True when every rank has left its loop and no save is pending."""
        return self.attempt.is_finished and self.committer.is_idle

    @property
    def bad_end(self) -> Failure | None:
        """Failure of workers that are done although the last step is not saved; None otherwise."""
        if not self.is_done or self.state.saved_step >= self.job.run.steps:
            return None
        saved_step, cause = self.state.saved_step, self.committer.error
        return unsaved(step=self.attempt.step, saved_step=saved_step, cause=cause)

    def open(self) -> None:
        """Emit the event that the driver has started or resumed the run."""
        record = self._journal.record
        self._sink.emit(
            RunStarted(
                run_id=record.run_id,
                name=record.name,
                uri=self._store.uri,
                is_resumed=record.num_attempts > 0,
                step=self.state.saved_step,
                total_steps=self.job.run.steps,
                job=self.job.model_dump(mode="json"),
            )
        )

    def move(self, to: State, reason: str) -> None:
        """Enter the state ``to`` and write the transition to the journal."""
        log.debug("%s -> %s: %s", self.state.state, to, reason)
        self.state = self.state.move(to, now_s=self.clock.monotonic(), reason=reason)
        self._journal.note(self.state)

    def change_grid(self, plan: RunPlan, homes: Mapping[int, int] | None = None) -> None:
        """Use ``plan`` and its grid for the next attempt; see ``WorkerGroup.use`` for ``homes``."""
        if not plan.datasets:  # a smaller grid's plan follows from the job alone
            plan = replace(plan, datasets=self.grids.now.datasets)
        old, new = self.grids.now.grid, plan.grid
        change = f"{old.describe()} to {new.describe()}, {counted(new.world_size, 'worker')}"
        self.grids.now = plan
        self.group.use(plan, homes)
        log.warning("re-planned from %s", change)
        self.state = replace(self.state, reason=f"{self.state.reason}; re-planned from {change}")

    def begin_attempt(self) -> None:
        """Begin the next attempt: take its number, record it, emit the event and start the workers."""
        self.recovery_log.passed("reserve")
        # the number is granted in the store before anything can be written under it
        self.state = replace(self.state, attempt=self.lease.begin_attempt())
        self.move(State.STARTING, self.state.reason)
        start, spares = self._restore.start, self._num_spares()
        self._journal.begin(self.grids.now, self.state, restored=start.key, spares=spares)
        self._forget_attempt()
        plan = self.grids.now
        self._tell(attempt_event(self.state, plan, source=start.source))
        self.group.start(
            AttemptSpec(
                plan_json=self.grids.now.to_json(),
                run_uri=self._store.uri,
                attempt=self.state.attempt,
                restore=start.key,
                holders=start.holders,
                skipped_samples=self._restore.skipped_samples,
                entry_input=self._tasks.pack() if self._tasks else b"",
                reported_step=self.replicas.begin_attempt(),
            )
        )

    def _forget_attempt(self) -> None:
        """Create the books of the state's attempt, empty and for the present grid."""
        plan = self.grids.now
        self.attempt = AttemptMonitor(
            world_size=plan.grid.world_size,
            first_step=self.state.step,
            elastic=plan.job.elastic,
            now_s=self.clock.monotonic(),
            steps_s=self.grids.steps_s(),
        )
        self.committer = CheckpointCommitter(
            plan=plan,
            attempt=self.state.attempt,
            store=self._store,
            executor=self._executor,
            clock=self.clock,
            sources=self._restore.sources,
        )
        self._ranks = RankReports(plan)
        self._is_announced = False

    def poll_reports(self) -> Failure | None:
        """Handle reports, commits and overdue progress; return the failure if the attempt is lost."""
        reports = self.group.poll(TICK_S)
        self._announce_workers()
        now_s = self.clock.monotonic()
        for report in reports:
            self.attempt.observe(report, now_s)
            if not is_sign_of_life(report):  # of which each rank gives two a second
                self._take(report)
        self._take_outcomes()
        if (silent := self.attempt.probe_due(now_s)) is not None:
            self.group.probe(silent)
        return self.attempt.failure(now_s)

    def handle_failure(self, failure: Failure) -> None:
        """Record the loss of the attempt and restart, roll back, stop or give up, as the policy decides."""
        # an unreadable checkpoint is no failure of the run: the one before is tried
        is_at_start = self.state.state is State.RUNNING and self.attempt.could_not_restore(failure)
        if is_at_start and self._restore.start.key:
            self._restore.give_up_on_newest()
            self._note(failure, decided := "the checkpoint cannot be read, the one before is next")
            self.move(State.RESTARTING, decided)
            return
        # every other failure counts against the policy's budgets
        decision = self.recovery_log.decide(failure)
        self._journal.record_failure(failure)
        self._note(failure, decision.reason)
        if failure.traceback:
            log.error("%s; %s\n%s", failure.headline, decision.reason, failure.traceback)
        if decision.action is Action.GIVE_UP:
            self.error = give_up_error(failure, decision.reason)
            self.move(State.FAILED, failure.cause)
        elif self.state.state is State.STOPPING and not self.job.elastic.snapshot_every:
            self.move(State.PREEMPTED, f"the last save was lost: {failure.cause}")
        else:
            if decision.action is Action.ROLL_BACK:
                self._restore.roll_back(failure, attempt=self.state.attempt)
            self.replicas.judge(failure, decision)
            self.move(State.RESTARTING, f"{failure.headline}, {decision.reason}")

    def abort_attempt(self) -> None:
        """End the attempt on all ranks, and go back to the newest checkpoint or snapshot."""
        self._journal.record_state(self.state)
        self.group.release(keep_warm=True)
        self.recovery_log.passed("abort")
        self.committer.end(DRAIN_S)
        self._take_outcomes()
        held = self.replicas.find(
            self.state,
            saved_every=self.job.checkpoint.every,
            has_restored=self.attempt.has_passed("restored"),
        )
        if held is None:
            self._find_state()
        else:
            self.state = replace(self.state, step=held.step)
        self.recovery_log.passed("find")
        if held is not None and held.homes is not None:
            self.change_grid(held.plan, held.homes)
        elif held is None and self.grids.can_be_full(self.group.ready()):
            self.change_grid(self.grids.full)
        self.recovery_log.go_back(self.state.step, source=self._restore.start.source)

    def fail(self, error: RaymegaError) -> None:
        """Give up with ``error``."""
        self.error = error
        self.move(State.FAILED, str(error))

    def end(self) -> RunFinished:
        """Release everything, write the journal's end, and return and emit the final event."""
        self.group.release(keep_warm=False)
        self.committer.end(DRAIN_S)
        try:
            self._take_outcomes()
        except LeaseError as error:
            self.error = error
        self._journal.end(self.state, DRAIN_S)
        ended = finished_event(
            self.state, self.error, uri=self._restore.uri, recovery_log=self.recovery_log
        )
        self._sink.emit(ended)
        return ended

    def raise_what_ended_it(self) -> None:
        """Raise the error that ended the run; return when every step is done.

        Raises:
            PreemptedError: The run was stopped.
            RaymegaError: The driver gave up.
        """
        if self.error is not None:
            raise self.error
        if self.state.state is State.PREEMPTED:
            raise stopped(self._journal.record, self.state)

    def _announce_workers(self) -> None:
        if not self._is_announced and (members := self.group.members()):
            self._is_announced = True
            self._ranks.nodes = {rank: at.node_id for rank, at in sorted(members.items())}
            pids = {rank: at.pid for rank, at in sorted(members.items())}
            self._tell(WorkersStarted(pids=pids, nodes=self._ranks.nodes))

    def _take(self, report: Report | WorkerStatus) -> None:
        if (progress := self.committer.handle_report(report)) is not None:
            self._tell(progress)
        match report:
            case Entered() if self.attempt.has_passed(report.phase):
                self.recovery_log.passed(PHASE_OF[report.phase])
            case StepFinished():
                self._take_step(report)
            case RankTimeline() | RankMemory() | ExpertLoads():
                for event in self._ranks.add(report):
                    self._tell(event)
            case EvaluationFinished() | SamplesDrawn() | NodesChecked() | BadStep() | SaveSkipped():
                self._tell(report)
            case EntryOutput() if self._tasks is not None:
                self._tell(self._tasks.judge_output(report))

    def _take_step(self, report: StepFinished) -> None:
        self.state = replace(self.state, step=report.step)
        step_s = report.metrics.get("train/step_time_s", 0.0)
        self.grids.add_step(step_s)
        if report.metrics.get("checkpoint/snapshot_step"):  # this attempt has a whole snapshot
            self.group.snapshot_manager.settle()
        own = {"run/spares": float(self._num_spares()), "run/lease_age_s": self.lease.age_s}
        self._tell(replace(report, metrics={**report.metrics, **own}))
        if (news := self._spares.observe(self._num_spares(), step=report.step)) is not None:
            self._tell(news)
        recovered = self.recovery_log.add_step(report.step, seconds=step_s)
        if recovered is not None:
            self.grids.change_s = recovered.recovery_s
            self._tell(recovered)

    def _take_outcomes(self) -> None:
        for outcome in self.committer.pop_outcomes():
            match outcome:
                case CheckpointCommitted():
                    self.state = replace(self.state, saved_step=outcome.step)
                    self._restore.uri = outcome.uri
                    self._journal.record_state(self.state)
                    self._tell(outcome)
                case SaveFailed():
                    log.warning("the save of step %d failed: %s", outcome.step, outcome.reason)
                    self._tell(outcome)
                case Superseded():
                    self.lease.renew()  # reads who holds the run now, for the error
                    self.lease.refuse_if_lost()

    def _note(self, failure: Failure, decision: str) -> None:
        self._tell(
            AttemptFailed(
                rank=failure.rank, step=failure.step, cause=failure.cause,
                is_rollback=failure.wants_rollback, decision=decision,
                whereabouts=self.attempt.whereabouts(),
            )
        )  # fmt: skip
        attempt = self.attempt
        self.recovery_log.begin(failure, step=attempt.step, last_sign_s=attempt.last_sign_s)

    def _tell(self, event: AttemptEvent) -> None:
        """Emit an event of the present attempt.

        Raises:
            InternalError: A metric is not in ``tracking/names.py``; checked here so that no sink has to.
        """
        if isinstance(event, Measured):
            check_names({*event.metrics, *chain.from_iterable(event.ranks.values())})
        self._sink.emit(replace(event, attempt=self.state.attempt))

    def _find_state(self) -> None:
        """Set the run's step to that of the newest checkpoint or snapshot that can be restored."""
        saved_step = self._restore.find(self._journal.record, saved_step=self.state.saved_step)
        self.state = replace(self.state, step=self._restore.start.step, saved_step=saved_step)

    def _num_spares(self) -> int:
        return max(0, len(self.group.ready()) - self.grids.now.grid.world_size)
