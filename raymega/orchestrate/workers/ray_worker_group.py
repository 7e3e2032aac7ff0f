"""The worker group on Ray: its processes, and the wait for their answers.

Each call names a function, which ``poll`` runs on the answer. Lost processes are replaced in the background;
``workers/attempt_start.py`` decides at the next attempt which process takes a lost rank, and starts them.
The controller begins attempts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError

from raymega.errors import CapacityError, ConfigError, Fault, raise_faults
from raymega.events import StepFinished
from raymega.messages import Report, Requests, WorkerDied
from raymega.orchestrate.cluster.node_inventory import list_free_nodes, list_nodes, node_memory
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.worker_group_api import (
    ANSWER_EVERY_S,
    TRAIN_ENTRY,
    AttemptSpec,
    Heartbeat,
    NodeDrain,
    NoSnapshots,
    SnapshotManager,
)
from raymega.orchestrate.workers.actor_calls import (
    ActorCalls,
    HangProbe,
    Reports,
    abort,
    death_cause,
    nothing,
)
from raymega.orchestrate.workers.attempt_start import AttemptStart
from raymega.orchestrate.workers.node_monitor import (
    WATCH_DIRECTLY,
    MonitorSlot,
    NodeMonitors,
    NodeReport,
)
from raymega.orchestrate.workers.placement_slots import WorkerSlot, WorkerSlots, kill, name_of
from raymega.orchestrate.workers.preflight import Preflight
from raymega.orchestrate.workers.rank_assignment import RankAssignment
from raymega.orchestrate.workers.snapshot_holders import SnapshotServers
from raymega.plan.run_plan import RunPlan
from raymega.plan.snapshot_replicas import memory_faults

log = logging.getLogger(__name__)

RESPAWN_S = 1.0
"""Pause before a dead process is replaced, in seconds: its node may be dying too."""
MANY_CALLS, LOOKS = 1024, 512
"""Number of pending calls from which on a poll waits for one answer in LOOKS of them, or for its timeout."""
LOOK_EVERY_S = 1.0
"""Interval between checks for slots whose node is gone, in seconds."""


class RayWorkerGroup:
    """The WorkerGroup protocol over a connected Ray; see ``core/worker_group_api.py`` for what may block."""

    def __init__(  # noqa: PLR0913  # the parts of a run that only some hosts and tests have
        self,
        plan: RunPlan,
        *,
        log_dir: Path,
        can_grow: bool,
        entry: str = TRAIN_ENTRY,
        preflight: Preflight | None = None,
        snapshot_servers: SnapshotServers | None = None,
        py_executable: Callable[[], str] | None = None,
    ) -> None:
        """Prepare the group; nothing is started.

        Args:
            plan: Plan of the run; its grid and cluster section determine the workers' resources.
            log_dir: Folder for each rank's output, on the rank's node.
            can_grow: Whether nodes may still join; then the group waits for room instead of failing.
            entry: Name of the module that a worker runs; see worker_actor.EntryModule.
            preflight: Check of each node before its first attempt; None for no check.
            snapshot_servers: Snapshot servers of the workers' snapshots; None for a run without snapshots.
            py_executable: See WorkerSlots.
        """
        # plans: of the next attempt, of the job's own grid, and of the grid that slots were asked for
        self._plan, self._full, self._asked = plan, plan, plan
        self._can_grow, self._entry = can_grow, entry
        self._slots = WorkerSlots(plan.job.cluster, can_grow=can_grow, py_executable=py_executable)
        self._assignment = RankAssignment(self._slots, plan)
        self._calls = ActorCalls()
        self._hang_probe = HangProbe(self._calls)
        self._spec: AttemptSpec | None = None
        self._snapshot_servers = snapshot_servers
        self._start = AttemptStart(
            self._slots, self._assignment, self._calls, log_dir=log_dir, preflight=preflight,
            snapshot_servers=snapshot_servers, on_started=self._on_started,
        )  # fmt: skip
        self._monitors = NodeMonitors(plan.job.run.name)
        self._probed_s = self._renewed_s = self._held_s = 0.0
        # of the attempt: first step seen; of the run: any process ordered
        self._is_stepping = self._has_begun = False
        self._held: dict[WorkerSlot, int] = {}  # of the last attempt, by the answers to its abort

    @property
    def snapshot_manager(self) -> SnapshotManager:
        """See WorkerGroup."""
        return self._snapshot_servers or NoSnapshots()

    def use(self, plan: RunPlan, homes: Mapping[int, int] | None = None) -> None:
        """See WorkerGroup."""
        self._plan = plan
        self._assignment.use(plan.grid, homes or {})

    def held(self) -> Mapping[int, int]:
        """See WorkerGroup."""
        return {
            slot.home: step
            for slot, step in self._held.items()
            if step >= 0 and slot.actor and not self._slots.is_leaving(slot)
        }

    def ready(self) -> tuple[WorkerLocation, ...]:
        """See WorkerGroup."""
        return tuple(slot.location for slot in self._slots.ready if slot.location)

    def is_loading(self) -> bool:
        """See WorkerGroup."""
        return bool(self._slots.loading())

    def drain(self) -> NodeDrain | None:
        """See WorkerGroup."""
        going = self._slots.drain(self._block)
        return going and replace(going, is_ready=self._assignment.warm_ranks() is not None)

    def reserve(self, timeout_s: float) -> Fault | None:
        """See WorkerGroup."""
        if self._assignment.living_ranks() is not None:  # the processes suffice, loaded or not
            return None
        self._drop_empty_slots()
        self._slots.give_back_half()
        self._renew_lost()
        lacking = None
        try:  # would the grid fit, were the nodes idle?
            nodes = list_nodes(self._plan.job.cluster)
            node_of = self._assignment.nodes_of_ranks(nodes)
            if not self._slots.are_asked_for:
                raise_faults(ConfigError, memory_faults(self._plan, node_of, node_memory()))
        except CapacityError as error:
            if not self._can_grow:
                raise
            lacking = error.faults[0]
        if self._slots.may_be_asked_for:
            self._ask_for_slots()  # even if nothing fits yet: an autoscaler adds nodes for pending requests
        if (self._plan is self._asked or not self._slots.slots) and self._slots.wait(timeout_s):
            return None
        self._fill_later()
        self._listen(timeout_s)
        return lacking or self._slots.not_free(self._plan.grid, block=self._block)

    def start(self, spec: AttemptSpec) -> None:
        """See WorkerGroup."""
        self._spec, self._is_stepping, holders, self._held = spec, False, self._held, {}
        is_enough = self._assignment.living_ranks() is not None
        if not is_enough:  # start a process in each slot, named by the rank that it will have
            self._expect_ranks()
            self._fill([slot for slot in self._slots.slots if not slot.is_spare])
        self._start.begin(spec, holders=holders, are_living_enough=is_enough)

    def members(self) -> Mapping[int, WorkerLocation]:
        """See WorkerGroup."""
        return {
            slot.rank: slot.location
            for slot in self._slots.slots
            if slot.assigned and slot.location
        }

    def poll(self, timeout_s: float) -> Reports:
        """See WorkerGroup."""
        reports = self._listen(timeout_s)
        if self._snapshot_servers:
            self._snapshot_servers.collect()
        self._start.proceed()
        reports += self._renew_lost()
        self._is_stepping |= any(isinstance(report, StepFinished) for report in reports)
        if self._is_stepping:  # not earlier: loading would take cores from the start
            self._fill_later()
        return [*self._hang_probe.pop_results(), *reports, *self._missing_nodes()]

    def probe(self, silent: Collection[int]) -> None:
        """See WorkerGroup."""
        self._hang_probe.ask(self._slots.slots, silent)

    def request(self, requests: Requests) -> None:
        """See WorkerGroup."""
        attempt = self._spec.attempt if self._spec else 0
        # a save counts on rank 0 alone
        slots = self._assignment.assigned_slots
        for slot in slots if requests.stop else [slot for slot in slots if slot.rank == 0]:
            self._calls.submit(slot, "set_requests", requests, attempt, on_result=nothing)

    def release(self, *, keep_warm: bool) -> None:
        """See WorkerGroup."""
        self._calls.end_attempt()
        self._monitors.end_attempt()
        attempt = self._spec.attempt if self._spec else 0
        self._spec, self._is_stepping = None, False
        assigned_slots = self._assignment.assigned_slots
        if keep_warm:  # a stopped process cannot answer an abort, nor one that hangs in its start
            self._kill(self._hang_probe.pop_stopped())
            self._held = self._start.held(free := abort(assigned_slots, attempt))
            stuck = self._slots.stuck(self._plan.job.elastic.start_timeout_s)
            self._kill([*(slot for slot in assigned_slots if slot not in free), *stuck])
        self._start.end()
        for slot in assigned_slots:
            slot.assigned = None
        if not keep_warm:
            self._calls.clear()
            self._slots.release()
            self._monitors.close()
            if self._snapshot_servers is not None:
                self._snapshot_servers.close()

    @property
    def _block(self) -> int:
        return self._assignment.block_of(self._asked.grid)

    def _drop_empty_slots(self) -> None:
        """Release slots of another grid once they have no process, to ask for this grid's slots together."""
        slots = self._slots.slots
        if self._plan is not self._asked and not any(slot.location for slot in slots):
            self._kill(slots)
            self._slots.release()

    def _ask_for_slots(self) -> None:
        """Ask for the grid's slots, and for spare slots: up to the job's own grid, plus elastic.spares."""
        self._asked = self._plan
        num_workers = self._asked.grid.world_size
        num_beside = self._full.grid.world_size - num_workers + self._full.job.elastic.spares
        self._slots.ask(
            num_workers=num_workers,
            num_spares=num_beside,
            block=self._block,
            nodes=self._assignment.nodes_of_blocks(list_free_nodes(self._plan.job.cluster)),
        )

    def _renew_lost(self) -> list[Report]:
        """Ask again for slots of lost nodes; return deaths on them that Ray has not yet reported."""
        now_s = time.monotonic()
        if now_s - self._renewed_s < LOOK_EVERY_S:
            return []
        self._renewed_s = now_s
        # the ranks of a drained node are elsewhere
        if self._is_stepping and (old := self._slots.replaced()):
            self._kill(old)
            self._slots.give_back(old)
        lost = self._slots.lost()
        untold = [slot.rank for slot in lost if slot.actor is not None and self._is_awaited(slot)]
        self._kill(lost)
        self._slots.ask_anew(lost)
        return [WorkerDied(rank=rank, cause="its node is gone") for rank in untold]

    # Processes.

    def _expect_ranks(self) -> None:
        locations = self._assignment.expect()
        # snapshot servers start while workers import torch
        if self._snapshot_servers and locations:
            self._snapshot_servers.location({location.node_id for location in locations})

    def _fill_later(self) -> None:
        """Start spares and replacements of lost processes, for which no attempt waits yet."""
        now_s = time.monotonic()
        if self._has_begun:
            self._fill([slot for slot in self._slots.slots if now_s >= slot.respawn_at_s])

    def _fill(self, slots: list[WorkerSlot]) -> None:
        """Start a process in each of ``slots`` that has none: hold, preload, then its location."""
        self._has_begun = True
        empty = [slot for slot in slots if slot.actor is None]
        if not empty:
            return
        attempt = self._spec.attempt if self._spec else 0
        plan_json, forkable = self._plan.to_json(), self._slots.forkable()
        for slot in empty:
            name, is_forkable = name_of(slot, self._plan, attempt=attempt), slot.group in forkable
            self._slots.spawn(slot, name=name, entry=self._entry, is_forkable=is_forkable)
            submit = partial(self._calls.submit, slot, is_of_attempt=False)
            submit("hold", on_result=nothing)
            submit("preload", plan_json, self._slots.device, on_result=self._on_warm)
            submit("location", on_result=self._on_location)

    def _on_location(self, slot: WorkerSlot, location: WorkerLocation) -> Reports:
        slot.location = location
        self._start.count_answer(slot)
        return []

    def _on_warm(self, slot: WorkerSlot, _answer: None) -> Reports:
        slot.is_warm = True
        self._start.count_answer(slot)
        return []

    def _on_death(self, slot: WorkerSlot, error: RayError) -> list[Report]:
        if isinstance(slot, MonitorSlot):  # the driver hears its ranks itself
            log.warning("the monitor of node %s is gone: %s", slot.node_id, death_cause(error))
            for each in self._monitors.drop(slot):
                self._on_reports(each, None)
            return []
        return self._lose_worker(slot, death_cause(error))

    def _lose_worker(self, slot: WorkerSlot, why: str) -> list[Report]:
        at = slot.location
        who = f"process {at.pid} on {at.address}" if at else "a process"
        cause = f"{who} is gone ({why})"
        kill([slot])  # Ray may have lost only the way to it
        slot.respawn_at_s = time.monotonic() + RESPAWN_S
        if self._is_awaited(slot):
            return [WorkerDied(rank=slot.rank, cause=cause)]
        log.warning("a process without a rank was lost: %s", cause)
        return []

    def _is_awaited(self, slot: WorkerSlot) -> bool:
        """Return whether the attempt depends on the slot: it has a rank, or the start waits for it."""
        is_starting = self._spec is not None and not self._start.is_assigned
        return slot.assigned is not None or (is_starting and not slot.is_spare)

    def _kill(self, slots: list[WorkerSlot]) -> None:
        self._calls.forget(*slots)
        kill(slots)

    def _missing_nodes(self) -> list[Report]:
        """Return a death if a start waits for a process on a lost node, which would never answer."""
        now_s = time.monotonic()
        is_due = now_s - self._probed_s >= LOOK_EVERY_S
        if self._start.is_assigned or not self._spec or not is_due:
            return []
        self._probed_s = now_s
        if self._slots.are_held:
            return []
        return [WorkerDied(rank=-1, cause="the node of a slot is gone")]

    # Reports of the workers.

    def _on_started(self, slot: WorkerSlot, _answer: None) -> Reports:
        """Ask the worker for reports, or once all workers of its node have started the node's monitor."""
        assigned = self._assignment.assigned_slots if not self._monitors.are_heard else ()
        if not self._monitors.are_heard and len(assigned) <= WATCH_DIRECTLY:
            return self._on_reports(slot, None)
        monitor = self._monitors.add_started(slot, assigned)
        if monitor is not None:
            workers = {rank: each.actor for rank, each in monitor.heard.items()}
            self._calls.submit(monitor, "watch", workers, on_result=self._on_watching)
        return [Heartbeat(rank=slot.rank, every_s=self._monitors.every_s)]

    def _on_watching(self, monitor: WorkerSlot, _answer: None) -> Reports:
        every_s = self._monitors.every_s
        self._calls.submit(monitor, "next_reports", every_s, on_result=self._on_node_reports)
        return []

    def _on_node_reports(self, monitor: WorkerSlot, found: NodeReport) -> Reports:
        assert isinstance(monitor, MonitorSlot), "a monitor was asked"
        self._on_watching(monitor, None)
        # a rank's answer waits for its monitor's next one
        every_s = self._monitors.every_s + ANSWER_EVERY_S
        reports: Reports = [Heartbeat(rank=rank, every_s=every_s) for rank in found.heard]
        reports += found.reports
        for rank, why in found.deaths.items():
            slot = monitor.heard[rank]
            if slot.actor is not None:  # not told by its own call already
                self._calls.forget(slot)
                reports += self._lose_worker(slot, why)
        return reports

    def _on_reports(self, slot: WorkerSlot, reports: list[Report] | None) -> Reports:
        self._calls.submit(slot, "next_reports", ANSWER_EVERY_S, on_result=self._on_reports)
        return [Heartbeat(rank=slot.rank), *(reports or ())]

    def _listen(self, timeout_s: float) -> Reports:
        """Wait for the first answer, and return the reports of all answers that are there."""
        starting = self._snapshot_servers.pending() if self._snapshot_servers else []
        # monitors tell of deaths too: then the calls that end with a process are a second way, looked at now and then
        now_s = time.monotonic()
        with_holds = not self._monitors.are_heard or now_s - self._held_s >= LOOK_EVERY_S
        if with_holds:
            self._held_s = now_s
        if not (refs := [*self._calls.refs(with_holds=with_holds), *starting]):
            return []
        # of thousands of calls several must answer, or the loop would look at all of them for each
        num_returns = 1 if len(refs) < MANY_CALLS else len(refs) // LOOKS
        ready, waiting = ray.wait(refs, num_returns=num_returns, timeout=timeout_s)
        if ready and waiting:  # take the others that have come, without waiting
            ready += ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        return [
            report for ref in ready for report in self._calls.handle_result(ref, self._on_death)
        ]
