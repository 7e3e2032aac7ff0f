"""The driver's loop: a state machine stepped once a tick, owner of attempts, commits and the run.

It decides by asking policies, acts through the worker group, and tells the sink what happened. It
trains nothing, and every wait it makes is bounded.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from dataclasses import replace

from raymega.errors import CapacityError, LeaseError, RaymegaError
from raymega.messages import (
    Entered,
    Evaluated,
    ExpertsLoaded,
    MemoryMeasured,
    NodesChecked,
    Report,
    Requests,
    StepDone,
    StepDoubted,
    TimelineRecorded,
)
from raymega.orchestrate import events, verdicts
from raymega.orchestrate.clock import Clock
from raymega.orchestrate.goodput import GoodputMeter
from raymega.orchestrate.grids import Grids
from raymega.orchestrate.group import AttemptOrder, WorkerGroup
from raymega.orchestrate.journal import Journal
from raymega.orchestrate.lease import Lease
from raymega.orchestrate.losses import Losses
from raymega.orchestrate.policies import Action, Failure, give_up_error, policy_of, unsaved
from raymega.orchestrate.restore import RestorePoint
from raymega.orchestrate.saves import Committed, Refused, Superseded
from raymega.orchestrate.signs import Sign
from raymega.orchestrate.states import State
from raymega.orchestrate.work import Work, begin_work
from raymega.plan.run_plan import RunPlan
from raymega.tracking.sink import RunFinished, Sink

log = logging.getLogger(__name__)

TICK_S = 0.25
"""Longest wait of one tick, and so of a stop request for its answer."""
DRAIN_S = 30.0
"""Longest wait for a commit under way before a restart looks for the newest checkpoint."""


class Controller:
    """One driver's work on one run. ``run`` does it all; ``tick`` is one step of it."""

    def __init__(
        self,
        plan: RunPlan,
        *,
        lease: Lease,
        group: WorkerGroup,
        sink: Sink,
        clock: Clock,
        executor: Executor,
    ) -> None:
        """Read the run's journal and find where it stands; nothing is started or written.

        Args:
            plan: What to run.
            lease: On the run, whose store it knows; this driver has taken it, and somebody renews it.
            group: Workers; released when the run ends.
            sink: Gets every event; must not raise and not block.
            clock: For deadlines and durations.
            executor: One thread for writes to the store; stays open.

        Raises:
            ConfigError: The store holds a run of this name with another model, seed or data.
            CheckpointError: The run has checkpoints, and none can be restored.
        """
        self._job, self._lease = plan.job, lease
        self._store, self._group, self._sink = lease.store, group, sink
        self._clock, self._executor = clock, executor
        self._journal = Journal(plan.job, lease=lease, executor=executor, clock=clock)
        past = self._journal.past
        self._grids = Grids(plan, num_before=past.num_workers)
        self._losses = Losses(policy_of(plan.job.elastic), clock, earlier=past.failures)
        self._restore = RestorePoint(lease.store, plan.job, group.keeping)
        self._error: RaymegaError | None = None
        self._is_stop_asked = False
        self.state = self._journal.first_state()
        self._go_back_to_checkpoint()
        self._meter = GoodputMeter(first_step=self.state.step, now_s=clock.monotonic())
        self._work = self._new_work()
        self._handlers = {
            State.SCHEDULING: self._schedule,
            State.STARTING: self._wait_for_start,
            State.RUNNING: self._watch,
            State.STOPPING: self._wait_for_stop,
            State.RESIZING: self._wait_for_resize,
            State.RESTARTING: self._clear_up,
        }

    def request_stop(self) -> None:
        """Ask for a stop with a save at the next step; callable from a signal handler."""
        self._is_stop_asked = True

    def run(self) -> RunFinished:
        """Step to an end, and leave nothing behind.

        Raises:
            PreemptedError: The run was stopped before its end and can be continued.
            LeaseError: Another driver has taken the run.
            RaymegaError: The driver gave up; the class tells the exit code.
        """
        record, uri = self._journal.record, self._store.uri
        self._sink.emit(events.run_started(self._grids.now, record, self.state, uri=uri))
        try:
            while not self.state.state.is_end:
                self.tick()
        except RaymegaError as error:
            self._error = error
            self._move(State.FAILED, str(error))
        finally:
            ended = self._end()
        if self._error is not None:
            raise self._error
        if self.state.state is State.PREEMPTED:
            raise verdicts.stopped(record, self.state)
        return ended

    def tick(self) -> None:
        """One step of the state machine; returns within some TICK_S, but for clearing up."""
        self._lease.refuse_if_lost()
        self._handlers[self.state.state]()

    # One handler a state.

    def _schedule(self) -> None:
        if self.state.saved_step >= self._job.run.steps:
            done = f"step {self.state.saved_step} of {self._job.run.steps} is saved"
            self._move(State.FINISHED, f"nothing is left to do: {done}")
            return
        if self._is_stop_asked:
            self._move(State.PREEMPTED, "stopped before its workers started")
            return
        lacking = self._group.reserve(TICK_S)
        if lacking is None:
            self._losses.mark("reserve")
            self._begin_attempt()
        elif self._shrink():
            return
        elif self._seconds_here() > self._job.cluster.capacity_timeout_s:
            raise CapacityError(lacking)

    def _wait_for_start(self) -> None:
        failure = self._listen()
        if failure is not None:
            self._lose(failure)
        elif self._is_stop_asked:
            self._move(State.PREEMPTED, "stopped before its first step")
        elif self._work.attempt.has_met:
            self._move(State.RUNNING, "all workers have met")

    def _watch(self) -> None:
        failure = self._listen() or self._bad_end()
        if failure is not None:
            self._lose(failure)
        elif self._is_done():
            self._move(State.FINISHED, "every step is done and saved")
        elif self._is_stop_asked:
            self._group.request(Requests(stop=True, save=True))
            self._move(State.STOPPING, "asked to stop")
        elif self._work.saves.is_wished_for(self.state.step):
            self._group.request(Requests(save=True))
        else:
            self._leave_or_grow()

    def _wait_for_stop(self) -> None:
        failure = self._listen()
        limit_s = self._job.elastic.stop_timeout_s
        if failure is not None:
            self._lose(failure)
        elif self._is_done():
            is_whole = self.state.saved_step >= self._job.run.steps
            self._move(State.FINISHED if is_whole else State.PREEMPTED, "asked to stop")
        elif self._seconds_here() > limit_s:
            reason = f"the last save took longer than elastic.stop_timeout_s={limit_s:g}"
            self._move(State.PREEMPTED, reason)

    def _wait_for_resize(self) -> None:
        """A save that fails costs steps, not the change: the state before it is gone back to."""
        failure = self._listen()
        if failure is not None:
            self._lose(failure)
        elif self._is_done() and self.state.saved_step >= self._job.run.steps:
            self._move(State.FINISHED, "every step is done and saved")
        elif self._is_done() or self._seconds_here() > self._job.elastic.stop_timeout_s:
            self._move(State.RESTARTING, self.state.reason)

    def _clear_up(self) -> None:
        self._journal.keep(self.state)
        self._group.release(keep_warm=True)
        self._losses.mark("abort")
        self._work.saves.wait(DRAIN_S)
        self._take_outcomes()
        self._go_back_to_checkpoint()
        self._losses.mark("find")
        if self._grids.can_be_full(self._group.ready()):
            self._change_grid(self._grids.full)
        self._meter.rewind(self.state.step)
        self._move(State.SCHEDULING, self.state.reason)

    # What they do.

    def _shrink(self) -> bool:
        """When lost workers have not come back in time: take the best grid for those that are left."""
        if self._seconds_here() <= self._job.elastic.replan_after_s:
            return False
        plan = self._grids.shrink(self._group.ready())
        if plan is None or plan == self._grids.now:
            return False
        self._change_grid(plan)
        return True

    def _leave_or_grow(self) -> None:
        """Save and go on elsewhere: when nodes are taken away, or the job's own grid is worth it again."""
        departure, margin_s = self._group.departure(), self._job.elastic.drain_margin_s
        if departure is not None:
            reason = departure.reason if departure.is_due(margin_s) else ""
        else:
            reason = self._grids.reason_to_grow(self._group.ready(), step=self.state.step)
        if reason:
            self._group.request(Requests(stop=True, save=True))
            self._move(State.RESIZING, reason)

    def _change_grid(self, plan: RunPlan) -> None:
        was = self._grids.now.grid
        self._grids.now = plan
        self._group.use(plan)
        change = f"{was.describe()} to {plan.grid.describe()}, {plan.grid.world_size} workers"
        log.warning("re-planned from %s", change)
        self.state = replace(self.state, reason=f"{self.state.reason}; re-planned from {change}")

    def _begin_attempt(self) -> None:
        """The attempt's number is on record before anything can be written under it."""
        self.state = replace(self.state, attempt=self._lease.begin_attempt())
        self._move(State.STARTING, self.state.reason)
        start, spares = self._restore.start, self._num_spares()
        self._journal.begin(self._grids.now, self.state, restored=start.key, spares=spares)
        self._work = self._new_work()
        self._sink.emit(events.attempt_started(self._grids.now, self.state, source=start.source))
        self._group.start(
            AttemptOrder(
                plan_json=self._grids.now.to_json(),
                run_uri=self._store.uri,
                attempt=self.state.attempt,
                restore=start.key,
                holders=start.holders,
                passed_over=self._restore.passed_over,
            )
        )

    def _listen(self) -> Failure | None:
        """Take in what workers and commits have to say; why the attempt is lost, if it is."""
        reports = self._group.poll(TICK_S)
        self._announce_workers()
        for report in reports:
            self._work.attempt.observe(report, self._clock.monotonic())
            self._take(report)
        self._take_outcomes()
        now_s = self._clock.monotonic()
        if (silent := self._work.attempt.look_due(now_s)) is not None:
            self._group.look(silent)
        return self._work.attempt.failure(now_s)

    def _announce_workers(self) -> None:
        members = self._group.members()
        if members and not self._work.is_announced:
            self._work.is_announced = True
            self._work.ranks.nodes = {rank: members[rank].node_id for rank in members}
            self._sink.emit(events.workers_started(self.state, members))

    def _take(self, report: Report | Sign) -> None:
        for told in self._work.saves.take(report):
            self._sink.emit(told)
        match report:
            case Entered():
                self._losses.mark_start(report.phase, self._work.attempt)
            case StepDone():
                self._take_step(report)
            case TimelineRecorded() | MemoryMeasured() | ExpertsLoaded():
                for event in self._work.ranks.take(report, attempt=self.state.attempt):
                    self._sink.emit(event)
            case Evaluated() | NodesChecked() | StepDoubted():
                self._sink.emit(events.of_report(self.state, report))

    def _take_step(self, report: StepDone) -> None:
        self.state = replace(self.state, step=report.step)
        step_s = report.metrics.get("train/step_time_s", 0.0)
        self._meter.add(step_s)
        self._grids.add_step(step_s)
        if report.metrics.get("checkpoint/snapshot_step"):
            self._group.keeping.settle()
        spares, age_s = self._num_spares(), self._lease.age_s
        self._sink.emit(events.step_finished(self.state, report, spares=spares, age_s=age_s))
        source = self._restore.start.source
        recovered = self._losses.end(
            self._work.attempt, number=self.state.attempt, step=report.step, source=source
        )
        if recovered is not None:
            self._grids.change_s = recovered.recovery_s
            self._sink.emit(recovered)

    def _take_outcomes(self) -> None:
        for outcome in self._work.saves.take_outcomes():
            match outcome:
                case Committed():
                    self.state = replace(self.state, saved_step=outcome.step)
                    self._restore.key = outcome.key
                    self._journal.keep(self.state)
                    self._sink.emit(events.checkpoint_committed(self.state, outcome))
                case Refused():
                    log.warning("the save of step %d failed: %s", outcome.step, outcome.reason)
                    self._sink.emit(events.save_failed(self.state, outcome))
                case Superseded():
                    self._lease.renew()  # learns who it was
                    self._lease.refuse_if_lost()

    def _lose(self, failure: Failure) -> None:
        """The attempt is lost; the policy says what follows."""
        if self.state.state is State.RUNNING and self._work.attempt.could_not_restore(failure):
            self._restore.give_up_on_newest()
            self._note(failure, decided := "the checkpoint cannot be read, the one before is next")
            self._move(State.RESTARTING, decided)
            return
        decision = self._losses.decide(failure)
        self._journal.lose(failure)
        self._note(failure, decision.reason)
        if failure.traceback:
            log.error("%s; %s\n%s", failure.headline, decision.reason, failure.traceback)
        if decision.action is Action.GIVE_UP:
            self._error = give_up_error(failure, decision.reason)
            self._move(State.FAILED, failure.cause)
        elif self.state.state is State.STOPPING:
            self._move(State.PREEMPTED, f"the last save was lost: {failure.cause}")
        else:
            if decision.action is Action.ROLL_BACK:
                self._restore.roll_back(failure, attempt=self.state.attempt)
            self._move(State.RESTARTING, f"{failure.headline}, {decision.reason}")

    def _note(self, failure: Failure, decision: str) -> None:
        where = self._work.attempt.whereabouts()
        self._sink.emit(
            events.failure_seen(self.state, failure, decision=decision, whereabouts=where)
        )
        self._losses.begin(failure, self._work.attempt)

    def _go_back_to_checkpoint(self) -> None:
        """Take the state back to the newest checkpoint or snapshot that can be restored."""
        saved_step = self._restore.find(self._journal.record, saved_step=self.state.saved_step)
        self.state = replace(self.state, step=self._restore.start.step, saved_step=saved_step)

    def _end(self) -> RunFinished:
        self._group.release(keep_warm=False)
        self._work.saves.wait(DRAIN_S)
        try:
            self._take_outcomes()
        except LeaseError as error:
            self._error = error
        self._journal.end(self.state, DRAIN_S)
        uri, now_s = self._restore.uri, self._clock.monotonic()
        ended = events.run_finished(
            self.state, self._meter, error=self._error, checkpoint_uri=uri, now_s=now_s
        )
        self._sink.emit(ended)
        return ended

    # What they ask.

    def _is_done(self) -> bool:
        return self._work.attempt.is_finished and self._work.saves.is_idle

    def _bad_end(self) -> Failure | None:
        if not self._is_done() or self.state.saved_step >= self._job.run.steps:
            return None
        return unsaved(step=self._work.attempt.step, saved_step=self.state.saved_step)

    def _num_spares(self) -> int:
        return max(0, len(self._group.ready()) - self._grids.now.grid.world_size)

    def _seconds_here(self) -> float:
        return self._clock.monotonic() - self.state.since_s

    def _new_work(self) -> Work:
        grids, store, executor = self._grids, self._store, self._executor
        return begin_work(grids, self.state, store=store, executor=executor, clock=self._clock)

    def _move(self, to: State, reason: str) -> None:
        log.debug("%s -> %s: %s", self.state.state, to, reason)
        self.state = self.state.move(to, now_s=self._clock.monotonic(), reason=reason)
        self._journal.note(self.state)
