"""The driver's control loop: a state machine that makes one step a tick.

It decides when each action is due, with the help of the policies; ``driver/run_context.py`` carries the
actions out. Every wait has a timeout.
"""

from __future__ import annotations

from math import inf

from raymega.errors import CapacityError, RaymegaError
from raymega.events import RunFinished
from raymega.messages import Requests
from raymega.orchestrate.core.state import RunState, State
from raymega.orchestrate.driver.run_context import TICK_S, RunContext

LOADING_PATIENCE = 3
"""Multiple of elastic.replan_after_s to wait for processes that are starting on live nodes.

They are ready sooner than a run on a smaller grid would grow back.
"""
AT_WORK = (State.STARTING, State.RUNNING, State.STOPPING, State.RESIZING)
"""States with workers, in which each tick first reads their reports and handles a failure, if there is one."""


class Controller:
    """The driver of one run: ``run`` executes it to its end, ``tick`` makes one step."""

    def __init__(self, context: RunContext) -> None:
        """Drive the run of ``context``; nothing is started or written."""
        self._context, self._job, self._lease = context, context.job, context.lease
        self._group, self._clock = context.group, context.clock
        self._stop_asked_s = inf  # no stop was asked for yet
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
        """State of the run, with its attempt and steps."""
        return self._context.state

    def request_stop(self) -> None:
        """Ask for a stop with a save at the next step; callable from a signal handler."""
        self._stop_asked_s = min(self._stop_asked_s, self._clock.monotonic())

    def run(self) -> RunFinished:
        """Make steps until the run ends, and release everything.

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
        """Make one step of the state machine; takes a few TICK_S at most, longer only in RESTARTING."""
        # a driver that has lost its lease must do nothing more
        self._lease.refuse_if_lost()
        here, context = self.state.state, self._context
        # failures first, then the state's handler
        if here in AT_WORK and (failure := context.poll_reports()) is not None:
            context.handle_failure(failure)
        else:
            self._handlers[here]()

    # One handler a state.

    def _schedule(self) -> None:
        context, steps = self._context, self._job.run.steps
        # reasons not to start an attempt
        if context.state.saved_step >= steps:
            done = f"step {context.state.saved_step} of {steps} is saved"
            context.move(State.FINISHED, f"nothing is left to do: {done}")
            return
        if self._is_stop_due():
            context.move(State.PREEMPTED, "stopped before its workers started")
            return
        # start, continue on a smaller grid, or wait for slots
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
        # the end, then the requests of people, then a change of nodes or grid
        if (bad_end := context.bad_end) is not None:
            context.handle_failure(bad_end)
        elif context.is_done:
            context.move(State.FINISHED, "every step is done and saved")
        elif self._asked_s_ago >= 0:
            self._group.request(Requests(stop=True, save=True))
            context.move(State.STOPPING, "asked to stop")
        elif (
            context.committer.is_requested(context.state.step) or context.replicas.take_owed_save()
        ):
            self._group.request(Requests(save=True))
        else:
            self._leave_or_grow()

    def _wait_for_stop(self) -> None:
        context, limit_s = self._context, self._job.elastic.stop_timeout_s
        if context.is_done:
            is_whole = context.state.saved_step >= self._job.run.steps
            cause = context.committer.error
            reason = f"asked to stop; the last save failed: {cause}" if cause else "asked to stop"
            context.move(State.FINISHED if is_whole else State.PREEMPTED, reason)
        elif self._asked_s_ago > limit_s:
            reason = f"the last save took longer than elastic.stop_timeout_s={limit_s:g}"
            context.move(State.PREEMPTED, reason)

    def _wait_for_resize(self) -> None:
        """Restart once the workers are done or late; if their save failed, from the checkpoint before it."""
        context = self._context
        if context.is_done and context.state.saved_step >= self._job.run.steps:
            context.move(State.FINISHED, "every step is done and saved")
        elif context.is_done or context.seconds_here > self._job.elastic.stop_timeout_s:
            context.move(State.RESTARTING, context.state.reason)

    def _clear_up(self) -> None:
        self._context.abort_attempt()
        self._context.move(State.SCHEDULING, self._context.state.reason)

    def _is_stop_due(self) -> bool:
        """Return whether a run without training workers must stop now because a stop was asked for.

        Steps that only snapshots hold must be saved first, so the run may start again to save them, for
        elastic.stop_timeout_s at most.
        """
        is_unsaved = self.state.step > self.state.saved_step
        return self._asked_s_ago >= (self._job.elastic.stop_timeout_s if is_unsaved else 0.0)

    @property
    def _asked_s_ago(self) -> float:
        """Seconds since a stop was asked for; negative infinity when none was."""
        return self._clock.monotonic() - self._stop_asked_s

    # When the grid changes.

    def _shrink(self) -> bool:
        """Change to the best grid for the remaining processes if lost ones were not replaced in time.

        Returns whether the grid changed.
        """
        context = self._context
        # wait for replacements, longer for processes that are starting already
        patience_s = self._job.elastic.replan_after_s
        if context.seconds_here <= patience_s:
            return False
        if context.seconds_here <= LOADING_PATIENCE * patience_s and self._group.is_loading():
            return False
        # the best legal grid, which may be the present one
        plan = context.grids.shrink(self._group.ready())
        if plan is None or plan == context.grids.now:
            return False
        context.change_grid(plan)
        return True

    def _leave_or_grow(self) -> None:
        """Save and restart when nodes drain, or when going back to the job's own grid is worth it."""
        # a drain comes first: growing onto nodes that leave would be of no use
        drain, margin_s = self._group.drain(), self._job.elastic.drain_margin_s
        if drain is not None:
            reason = drain.reason if drain.is_due(margin_s) else ""
        else:
            reason = self._context.grids.reason_to_grow(self._group.ready(), step=self.state.step)
        if not reason:
            return
        # what joins gets the state from replicas; who leaves a node saves it
        holds = drain is None and self._context.replicas.regroup(self._context.committer)
        if not holds:
            self._group.request(Requests(stop=True, save=True))
        self._context.move(State.RESIZING, reason)
