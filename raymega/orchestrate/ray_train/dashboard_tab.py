"""TrainTabSink: puts the run, its attempts and workers into Ray Train's own list of runs.

The list is what a dashboard's Train tab reads, at /api/train/v2/runs/v1. Its records are private to
Ray, so every step may fail: then the list shows less, and the run does not notice.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any

import ray
from ray._private import state as ray_state

from raymega.tracking.sink import (
    AttemptStarted,
    FailureSeen,
    RunEvent,
    RunFinished,
    RunStarted,
    RunStatus,
    WorkersStarted,
)

log = logging.getLogger(__name__)

KNOWN_RAY = "2.60."
"""Versions of Ray whose records are those below; another one is left alone."""
ANSWER_TIMEOUT_S = 10.0
NS_PER_S = 1_000_000_000

_SHOWN = (RunStarted, AttemptStarted, WorkersStarted, FailureSeen, RunFinished)
_STATUS: Mapping[RunStatus, str] = {
    "finished": "FINISHED",
    "failed": "ERRORED",
    "preempted": "ABORTED",
    "superseded": "ABORTED",
}


class TrainTabSink:
    """Hands the run's turns to Ray Train's state actor, from a thread of its own.

    The actor is Ray's, a detached one that the first run of a cluster starts. It takes a run whose
    controlling actor is dead for aborted; a raymega driver is no actor, so the worker of rank 0
    stands for it, and between attempts the state actor itself.
    """

    def __init__(self, *, clock: Callable[[], float], version: str = ray.__version__) -> None:
        """Start the thread, unless Ray's ``version`` is not a known one.

        Args:
            clock: Seconds since the epoch.
            version: Ray's, whose records differ from one to the next.
        """
        self._clock = clock
        self._events: SimpleQueue[RunEvent | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="train-tab-sink", daemon=True)
        if version.startswith(KNOWN_RAY):
            self._thread.start()
        else:
            log.warning("the run is not in Ray Train's list, unknown in Ray %s", version)

    def emit(self, event: RunEvent) -> None:
        """Queue the event when it is a turn of the run; returns at once."""
        if isinstance(event, _SHOWN) and self._thread.is_alive():
            self._events.put(event)

    def close(self, timeout_s: float) -> None:
        """Let the thread show what is queued."""
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _work(self) -> None:
        try:
            tab = None
            while (event := self._events.get()) is not None:
                tab = tab or _Tab(self._clock)
                tab.show(event)
        except Exception as error:  # noqa: BLE001 - the thread's edge: watching stops no run
            log.warning("the run's entry in Ray Train's list stays as it is: %r", error)


class _Tab:
    """The records of one run as the tab has them. Ray gives them no type that it promises."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # Imports for a second; the thread has it.
        from ray.train.v2._internal.state import schema
        from ray.train.v2._internal.state.state_actor import get_or_create_state_actor

        self._schema, self._clock = schema, clock
        self._actor = get_or_create_state_actor()
        self._run: Any = None
        self._attempt: Any = None

    def show(self, event: RunEvent) -> None:
        """Change the records by the event, and hand them over."""
        match event:
            case RunStarted():
                self._run = self._new_run(event)
            case AttemptStarted():
                self._attempt = self._new_attempt(event)
                self._turn_run("SCHEDULING", event.reason)
            case WorkersStarted():
                self._assigned(event)
            case FailureSeen():
                self._end_attempt("ERRORED", event.cause)
                self._turn_run("RESTARTING", event.cause)
            case RunFinished():
                self._end_attempt(_STATUS[event.status], event.reason)
                self._turn_run(_STATUS[event.status], event.reason)
                self._run.end_time_ns = self._now_ns()
        self._hand_over()

    def _hand_over(self) -> None:
        refs = [self._actor.create_or_update_train_run.remote(self._run)]
        if self._attempt is not None:
            refs.append(self._actor.create_or_update_train_run_attempt.remote(self._attempt))
        ray.get(refs, timeout=ANSWER_TIMEOUT_S)

    def _turn_run(self, status: str, detail: str) -> None:
        self._run.status = self._schema.RunStatus[status]
        self._run.status_detail = detail or None
        self._run.controller_actor_id = self._own_id()

    def _end_attempt(self, status: str, detail: str) -> None:
        if self._attempt is None or self._attempt.status.is_terminal():
            return
        self._attempt.status = self._schema.RunAttemptStatus[status]
        self._attempt.status_detail = detail or None
        self._attempt.end_time_ns = self._now_ns()
        for worker in self._attempt.workers:
            worker.status = self._schema.ActorStatus.DEAD

    def _assigned(self, event: WorkersStarted) -> None:
        """The attempt's workers; Ray knows the actors by process."""
        actors = {(a["Address"]["NodeID"], a["Pid"]): a for a in _actors_of_this_driver()}
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(event.pids):
            ranks_of[event.nodes[rank]].append(rank)
        self._attempt.workers = [
            self._worker(actors[node, event.pids[rank]], rank, local_rank, node_rank)
            for node_rank, (node, ranks) in enumerate(ranks_of.items())
            for local_rank, rank in enumerate(ranks)
            if (node, event.pids[rank]) in actors
        ]
        self._run.run_settings.scaling_config.num_workers = len(event.pids)
        self._attempt.status = self._schema.RunAttemptStatus.RUNNING
        self._turn_run("RUNNING", "")
        if self._attempt.workers:
            self._run.controller_actor_id = self._attempt.workers[0].actor_id

    def _worker(self, actor: Mapping[str, Any], rank: int, local_rank: int, node_rank: int) -> Any:
        return self._schema.TrainWorker(
            world_rank=rank,
            local_rank=local_rank,
            node_rank=node_rank,
            actor_id=actor["ActorID"],
            node_id=actor["Address"]["NodeID"],
            node_ip=actor["Address"]["IPAddress"],
            pid=actor["Pid"],
            gpu_ids=[],
            status=self._schema.ActorStatus.ALIVE,
            resources=self._schema.TrainResources(resources={}),
        )

    def _new_run(self, event: RunStarted) -> Any:
        schema = self._schema
        return schema.TrainRun(
            id=event.run_id,
            name=event.name,
            job_id=ray.get_runtime_context().get_job_id(),
            controller_actor_id=self._own_id(),
            status=schema.RunStatus.INITIALIZING,
            status_detail=None,
            start_time_ns=self._now_ns(),
            framework_versions={"ray": ray.__version__},
            run_settings=_settings(schema, event),
        )

    def _new_attempt(self, event: AttemptStarted) -> Any:
        return self._schema.TrainRunAttempt(
            run_id=self._run.id,
            attempt_id=f"attempt-{event.attempt}",
            status=self._schema.RunAttemptStatus.PENDING,
            status_detail=event.reason,
            start_time_ns=self._now_ns(),
            resources=[],
            workers=[],
        )

    def _own_id(self) -> str:
        return str(self._actor._actor_id.hex())

    def _now_ns(self) -> int:
        return int(self._clock() * NS_PER_S)


def _actors_of_this_driver() -> list[dict[str, Any]]:
    job_id = ray.get_runtime_context().get_job_id()
    found = ray_state.actors()
    return [actor for actor in found.values() if actor["JobID"] == job_id]


def _settings(schema: Any, event: RunStarted) -> Any:
    """The job, in the places that the tab has for it."""
    return schema.RunSettings(
        train_loop_config=dict(event.job),
        backend_config=schema.BackendConfig(framework=None, config={}),
        scaling_config=schema.ScalingConfig(
            num_workers=1, use_gpu=False, placement_strategy="PACK", use_tpu=False
        ),
        datasets=[],
        data_config=schema.DataConfig(
            datasets_to_split=[],
            data_execution_options=schema.DataExecutionOptions(default=_no_data(schema)),
            enable_shard_locality=False,
        ),
        run_config=schema.RunConfig(
            name=event.name,
            failure_config=schema.FailureConfig(max_failures=0, controller_failure_limit=0),
            worker_runtime_env={},
            checkpoint_config=schema.CheckpointConfig(checkpoint_score_order="max"),
            storage_path=event.uri,
        ),
    )


def _no_data(schema: Any) -> Any:
    return schema.ExecutionOptions(
        resource_limits={},
        exclude_resources={},
        preserve_order=True,
        actor_locality_enabled=False,
        verbose_progress=False,
    )
