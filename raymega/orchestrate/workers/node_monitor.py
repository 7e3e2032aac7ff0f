"""The monitors of a large run: on each node a small actor that hears the node's ranks and answers for them.

The driver so receives answers by the number of nodes, and at an interval that grows with it. An actor's death
and every report but a heartbeat are passed on at once. Up to WATCH_DIRECTLY ranks there are no monitors, and
the driver asks each rank itself. ``workers/ray_worker_group.py`` handles the answers.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from threading import Condition, Event, Thread
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymega.messages import Progress, Report, Working
from raymega.orchestrate.core.worker_group_api import ANSWER_EVERY_S
from raymega.orchestrate.workers.actor_calls import broken_call, death_cause
from raymega.orchestrate.workers.placement_slots import WorkerSlot, kill

WATCH_DIRECTLY = 64
"""Number of ranks up to which the driver asks each of them."""
ANSWERS_PER_S = 512
"""Answers of monitors that the driver receives in a second, at most."""
LOOK_EVERY_S = 1.0
"""Longest time for which a monitor's thread waits for a rank before it sees that it is to stop, in seconds."""


def answer_every_s(num_nodes: int) -> float:
    """Return the interval in which each of ``num_nodes`` monitors answers, in seconds."""
    return max(ANSWER_EVERY_S, num_nodes / ANSWERS_PER_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """Reports that a monitor received since its last answer.

    Attributes:
        heard: Ranks whose process has answered.
        reports: Reports of the ranks, in order of arrival.
        deaths: Cause of each death, by rank.
    """

    heard: tuple[int, ...]
    reports: tuple[Report, ...]
    deaths: Mapping[int, str]


class NodeMailbox:
    """Reports of the ranks of one node, until the driver takes them; of heartbeats the newest is kept."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._heard: set[int] = set()
        self._beats: dict[int, Progress | Working] = {}
        self._reports: list[Report] = []
        self._deaths: dict[int, str] = {}

    def add(self, rank: int, reports: Collection[Report]) -> None:
        """Add one answer of a rank; a report that is no heartbeat wakes the driver's call."""
        with self._changed:
            self._heard.add(rank)
            for report in reports:
                if not isinstance(report, Progress | Working):
                    self._reports.append(report)
                elif isinstance(report, Progress) or rank not in self._beats:
                    self._beats[rank] = report
            if self._reports:
                self._changed.notify_all()

    def add_death(self, rank: int, cause: str) -> None:
        """Add the death of a rank's process, which wakes the driver's call."""
        with self._changed:
            self._deaths[rank] = cause
            self._changed.notify_all()

    def take(self, timeout_s: float) -> NodeReport:
        """Return all that came, when it is urgent, else after ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._reports or self._deaths, timeout_s)
            found = NodeReport(
                heard=tuple(self._heard),
                reports=(*self._beats.values(), *self._reports),
                deaths=self._deaths,
            )
            self._heard, self._beats, self._reports, self._deaths = set(), {}, [], {}
            return found


class NodeMonitorActor:
    """The actor of a monitor."""

    def __init__(self) -> None:
        self._mailbox, self._stop = NodeMailbox(), Event()

    def watch(self, workers: Mapping[int, ActorHandle[Any]]) -> None:
        """Hear ``workers``, the actors of the present attempt by rank, in a thread of its own."""
        self._stop.set()
        self._mailbox, self._stop = NodeMailbox(), Event()
        args = (dict(workers), self._mailbox, self._stop)
        Thread(target=hear, args=args, name="hear", daemon=True).start()

    def stop(self) -> None:
        """Hear no rank any more, as the attempt is over."""
        self._stop.set()

    def next_reports(self, timeout_s: float) -> NodeReport:
        """Return what the ranks reported; the driver's long poll."""
        return self._mailbox.take(timeout_s)


def hear(workers: Mapping[int, ActorHandle[Any]], mailbox: NodeMailbox, stop: Event) -> None:
    """Take the reports of ``workers`` into ``mailbox`` until ``stop`` is set or all of them are dead."""
    calls: dict[ray.ObjectRef[Any], int]
    calls = {worker.next_reports.remote(ANSWER_EVERY_S): rank for rank, worker in workers.items()}
    while calls and not stop.is_set():
        ready, _ = ray.wait([*calls], num_returns=1, timeout=LOOK_EVERY_S)
        for ref in ready:
            rank = calls.pop(ref)
            try:
                mailbox.add(rank, ray.get(ref))
            except RayTaskError as error:
                mailbox.add(rank, [broken_call(rank, error)])
            except RayError as error:
                mailbox.add_death(rank, death_cause(error))
                continue
            calls[workers[rank].next_reports.remote(ANSWER_EVERY_S)] = rank


@dataclass(kw_only=True, slots=True, eq=False)
class MonitorSlot(WorkerSlot):
    """A node's monitor, to which calls go as to a worker, and the slots of the ranks that it hears."""

    node_id: str
    heard: dict[int, WorkerSlot] = field(default_factory=dict)


class NodeMonitors:
    """The monitors of a run by node; they outlive attempts."""

    def __init__(self, run: str) -> None:
        """Prepare without monitors; ``run`` is the name of the run."""
        self._run = run
        self._by_node: dict[str, MonitorSlot] = {}
        # of the attempt: number of ranks by node, and those that have started
        self._expected: dict[str, int] = {}
        self._started: dict[str, list[WorkerSlot]] = {}

    @property
    def every_s(self) -> float:
        """Interval in which each monitor answers, in seconds."""
        return answer_every_s(len(self._expected))

    @property
    def are_heard(self) -> bool:
        """True when ranks of the present attempt are heard by monitors."""
        return bool(self._started)

    def add_started(self, slot: WorkerSlot, assigned: Collection[WorkerSlot]) -> MonitorSlot | None:
        """Note that a worker has started; return its node's monitor if it was the node's last one.

        Args:
            slot: Slot of the worker.
            assigned: Slots of all ranks of the attempt.
        """
        assert slot.location, "a worker that has started has a location"
        if not self._expected:
            for each in assigned:
                if each.location:
                    node = each.location.node_id
                    self._expected[node] = self._expected.get(node, 0) + 1
        node = slot.location.node_id
        here = self._started.setdefault(node, [])
        here.append(slot)
        if len(here) < self._expected[node]:
            return None
        monitor = self._by_node.get(node) or self._spawn(node, slot)
        monitor.heard = {each.rank: each for each in here}
        return monitor

    def drop(self, monitor: MonitorSlot) -> list[WorkerSlot]:
        """Forget a monitor whose process is gone; return the slots that it heard."""
        self._by_node.pop(monitor.node_id, None)
        return [slot for slot in monitor.heard.values() if slot.actor is not None]

    def end_attempt(self) -> None:
        """Let no monitor hear a rank any more."""
        for monitor in self._by_node.values():
            if self.are_heard and monitor.actor is not None:
                monitor.actor.stop.remote()
            monitor.heard = {}
        self._expected, self._started = {}, {}

    def close(self) -> None:
        """Kill all monitors."""
        kill([*self._by_node.values()])
        self._by_node.clear()

    def _spawn(self, node: str, slot: WorkerSlot) -> MonitorSlot:
        # threads: one for the long poll, one for short calls
        options = {
            "name": f"{self._run}/monitor-{node[:8]}-{secrets.token_hex(3)}",
            "num_cpus": 0,
            "max_concurrency": 3,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        }
        actor = cast(ActorHandle[Any], ray.remote(NodeMonitorActor).options(**options).remote())
        self._by_node[node] = MonitorSlot(index=-1, group=slot.group, actor=actor, node_id=node)
        return self._by_node[node]
