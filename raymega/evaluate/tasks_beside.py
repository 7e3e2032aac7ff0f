"""Evaluates a run's tasks on workers of their own, beside the training, from its checkpoints as they are committed.

The training ranks take no part: a thread of the driver waits for scores. It evaluates the newest checkpoint that is
due; one that became due while another was evaluated is left out when a newer one is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Protocol

from raymega.config.schema import Job
from raymega.errors import CapacityError, one_line
from raymega.evaluate.plan import plan_beside
from raymega.evaluate.requests import Scores
from raymega.evaluate.scoring import ScoringWorkers
from raymega.evaluate.training_tasks import TrainingTasks, open_tasks
from raymega.events import CheckpointCommitted, RunEvent, RunFinished, TasksEvaluated
from raymega.tracking.sink import Sink

log = logging.getLogger(__name__)

MAX_CAUSE_LENGTH = 300


class Workers(Protocol):
    """Workers that score the requests of the tasks."""

    def score(self, uri: str) -> Sequence[Scores]:
        """Return the scores by the checkpoint at ``uri``; blocks until they are there."""

    def close(self) -> None:
        """End the workers."""


def open_run_tasks(job: Job) -> TrainingTasks | None:
    """Return the tasks of a run, None for none, after a look at all that they need.

    Raises:
        ConfigError: A file, the tokenizer or ``run.eval_tasks_grid`` is wrong.
    """
    tasks = open_tasks(job)
    if tasks is not None and job.run.eval_tasks_on == "beside":
        plan_beside(job)
    return tasks


def tasks_beside(job: Job, tasks: TrainingTasks) -> Callable[[Sink], Sink]:
    """Return what makes the sink that evaluates ``tasks`` beside the run, from the sink of its results."""
    plan = plan_beside(job)

    def make(watcher: Sink) -> Sink:
        return TasksBesideSink(
            tasks,
            start_workers=lambda: ScoringWorkers(plan, tasks.requests),
            is_due=lambda step: step == job.run.steps or _is_due(step, job.run.eval_tasks_every),
            watcher=watcher,
        )

    return make


class TasksBesideSink:
    """Sink that hands due checkpoints to a thread, and emits the metrics that have come to ``watcher``.

    It must come before the sinks behind ``watcher``, which get RunFinished after its results. Of a run that
    finishes, the last checkpoint is still evaluated; of any other end nothing more.
    """

    def __init__(
        self,
        tasks: TrainingTasks,
        *,
        start_workers: Callable[[], Workers],
        is_due: Callable[[int], bool],
        watcher: Sink,
    ) -> None:
        """Start the thread; workers are started with the first due checkpoint.

        Args:
            tasks: Tasks, which judge the scores.
            start_workers: Function that makes the workers.
            is_due: Function of a step that returns whether its checkpoint is evaluated.
            watcher: Sink that gets a TasksEvaluated for each evaluation.
        """
        self._tasks, self._start_workers = tasks, start_workers
        self._is_due, self._watcher = is_due, watcher
        self._next: CheckpointCommitted | None = None
        self._is_closing = False
        self._changed = Condition()
        self._done: SimpleQueue[TasksEvaluated] = SimpleQueue()
        self._thread = Thread(target=self._work, name="tasks-beside", daemon=True)
        self._thread.start()

    def emit(self, event: RunEvent) -> None:
        """Emit what has come, and take a due checkpoint; block only at the end of the run."""
        # a sink's events come from one thread, so results wait for the next event
        self._tell()
        if isinstance(event, CheckpointCommitted) and self._is_due(event.step):
            with self._changed:
                if self._next is not None:
                    log.warning(
                        "the tasks of step %d are left out: step %d is newer",
                        self._next.step,
                        event.step,
                    )
                self._next = event
                self._changed.notify()
        if isinstance(event, RunFinished):
            self._end(is_rest_due=event.status == "finished")
            self._tell()

    def close(self, timeout_s: float) -> None:
        """End the thread, if the run's end has not."""
        self._end(is_rest_due=False, timeout_s=timeout_s)

    def _end(self, *, is_rest_due: bool, timeout_s: float | None = None) -> None:
        with self._changed:
            self._is_closing = True
            if not is_rest_due:
                self._next = None
            self._changed.notify()
        # an evaluation ends by itself: silent workers end it too
        self._thread.join(timeout_s if is_rest_due or timeout_s is not None else 0.0)

    def _tell(self) -> None:
        while not self._done.empty():
            self._watcher.emit(self._done.get())

    def _work(self) -> None:
        workers: Workers | None = None
        while (event := self._take()) is not None:
            try:
                workers = workers or self._start_workers()
                found = self._tasks.judge(workers.score(event.uri), step=event.step)
                self._done.put(replace(found, attempt=event.attempt))
            except Exception as error:  # noqa: BLE001 - the thread's edge: an evaluation stops no run
                why = one_line(str(error) or repr(error), MAX_CAUSE_LENGTH)
                hint = (
                    "; run.eval_tasks_on=grid needs no further workers"
                    if isinstance(error, CapacityError)
                    else ""
                )
                log.warning("the tasks of step %d were not evaluated: %s%s", event.step, why, hint)
        if workers is not None:
            workers.close()

    def _take(self) -> CheckpointCommitted | None:
        """Wait for the next due checkpoint; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._is_closing)
            event, self._next = self._next, None
            return event


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
