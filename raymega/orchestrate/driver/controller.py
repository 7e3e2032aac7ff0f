"""The driver's loop: a state machine stepped once a tick, owner of attempts, commits and the run.

It decides when what is due, by asking policies; run_context does it. It trains nothing, and every wait it
makes is bounded.
"""

from __future__ import annotations

from concurrent.futures import Executor
from math import inf

from raymega.errors import CapacityError, RaymegaError
from raymega.events import RunFinished
from raymega.messages import Requests
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.core.state import RunState, State
from raymega.orchestrate.core.worker_group_api import WorkerGroup
from raymega.orchestrate.driver.run_context import TICK_S, RunContext
from raymega.orchestrate.run_store.lease import Lease
from raymega.plan.run_plan import RunPlan
from raymega.tracking.sink import Sink

LOADING_PATIENCE = 3
"""So many times elastic.replan_after_s are processes waited for that load on nodes that live: they come
sooner than a run that has shrunk grows back."""
AT_WORK = (State.STARTING, State.RUNNING, State.STOPPING, State.RESIZING)
"""States with workers: what these have to say is taken in first, and a failure comes before all else."""


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
        self._job, self._lease, self._group = plan.job, lease, group
        self._context = RunContext(
            plan, lease=lease, group=group, sink=sink, clock=clock, executor=executor
        )
        self._clock, self._stop_asked_s = clock, inf
        self._handlers = {
            State.SCHEDULING: self._schedule,
            State.STARTING: self._wait_for_start,
            State.RUNNING: self._watch,
            State.STOPPING: self._wait_for_stop,
            State.RESIZING: self._wait_for_resize,
            State.RESTARTING: self._clear_up,
        }

    @property
    def state(self) -> RunState:
        """Where the run stands."""
        return self._context.state

    def request_stop(self) -> None:
        """Ask for a stop with a save at the next step; callable from a signal handler."""
        self._stop_asked_s = min(self._stop_asked_s, self._clock.monotonic())

    def run(self) -> RunFinished:
        """Step to an end, and leave nothing behind.

        Raises:
            PreemptedError: The run was stopped before its end and can be continued.
            LeaseError: Another driver has taken the run.
            RaymegaError: The driver gave up; the class tells the exit code.
        """
        self._context.open()
        try:
            while not self.state.state.is_end:
                self.tick()
        except RaymegaError as error:
            self._context.fail(error)
        finally:
            ended = self._context.end()
        self._context.raise_what_ended_it()
        return ended

    def tick(self) -> None:
        """One step of the state machine; returns within some TICK_S, but for clearing up."""
        self._lease.refuse_if_lost()
        here, context = self.state.state, self._context
        if here in AT_WORK and (failure := context.poll_reports()) is not None:
            context.handle_failure(failure)
        else:
            self._handlers[here]()

    # One handler a state.

    def _schedule(self) -> None:
        context, steps = self._context, self._job.run.steps
        if context.state.saved_step >= steps:
            done = f"step {context.state.saved_step} of {steps} is saved"
            context.move(State.FINISHED, f"nothing is left to do: {done}")
            return
        if self._is_stop_due():
            context.move(State.PREEMPTED, "stopped before its workers started")
            return
        lacking = self._group.reserve(TICK_S)
        if lacking is None:
            context.begin_attempt()
        elif self._shrink():
            return
        elif context.seconds_here > self._job.cluster.capacity_timeout_s:
            raise CapacityError(lacking)

    def _wait_for_start(self) -> None:
        context = self._context
        if self._is_stop_due():
            context.move(State.PREEMPTED, "stopped before its first step")
        elif context.attempt.has_met:
            context.move(State.RUNNING, "all workers have met")

    def _watch(self) -> None:
        context = self._context
        if (bad_end := context.bad_end) is not None:
            context.handle_failure(bad_end)
        elif context.is_done:
            context.move(State.FINISHED, "every step is done and saved")
        elif self._asked_s_ago >= 0:
            self._group.request(Requests(stop=True, save=True))
            context.move(State.STOPPING, "asked to stop")
        elif context.committer.is_requested(context.state.step):
            self._group.request(Requests(save=True))
        else:
            self._leave_or_grow()

    def _wait_for_stop(self) -> None:
        context, limit_s = self._context, self._job.elastic.stop_timeout_s
        if context.is_done:
            is_whole = context.state.saved_step >= self._job.run.steps
            context.move(State.FINISHED if is_whole else State.PREEMPTED, "asked to stop")
        elif self._asked_s_ago > limit_s:
            reason = f"the last save took longer than elastic.stop_timeout_s={limit_s:g}"
            context.move(State.PREEMPTED, reason)

    def _wait_for_resize(self) -> None:
        """A save that fails costs steps, not the change: the state before it is gone back to."""
        context = self._context
        if context.is_done and context.state.saved_step >= self._job.run.steps:
            context.move(State.FINISHED, "every step is done and saved")
        elif context.is_done or context.seconds_here > self._job.elastic.stop_timeout_s:
            context.move(State.RESTARTING, context.state.reason)

    def _clear_up(self) -> None:
        self._context.abort_attempt()
        self._context.move(State.SCHEDULING, self._context.state.reason)

    def _is_stop_due(self) -> bool:
        """A run that trains nothing stops when asked to; but first it saves what only snapshots hold."""
        is_unsaved = self.state.step > self.state.saved_step
        return self._asked_s_ago >= (self._job.elastic.stop_timeout_s if is_unsaved else 0.0)

    @property
    def _asked_s_ago(self) -> float:
        """Seconds since a stop was asked for; below 0 when none was."""
        return self._clock.monotonic() - self._stop_asked_s

    # When the grid changes.

    def _shrink(self) -> bool:
        """When lost workers have not come back in time: take the best grid for those that are left."""
        context = self._context
        patience_s = self._job.elastic.replan_after_s
        if context.seconds_here <= patience_s:
            return False
        if context.seconds_here <= LOADING_PATIENCE * patience_s and self._group.is_loading():
            return False
        plan = context.grids.shrink(self._group.ready())
        if plan is None or plan == context.grids.now:
            return False
        context.change_grid(plan)
        return True

    def _leave_or_grow(self) -> None:
        """Save and go on elsewhere: when nodes are taken away, or the job's own grid is worth it again."""
        drain, margin_s = self._group.drain(), self._job.elastic.drain_margin_s
        if drain is not None:
            reason = drain.reason if drain.is_due(margin_s) else ""
        else:
            reason = self._context.grids.reason_to_grow(self._group.ready(), step=self.state.step)
        if reason:
            self._group.request(Requests(stop=True, save=True))
            self._context.move(State.RESIZING, reason)
