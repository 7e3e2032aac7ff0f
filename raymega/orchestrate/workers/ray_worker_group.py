"""The worker group on Ray: its processes, what each worker is told, and one place to wait.

Every answer is met in poll by the function that was named when the call was made. Lost processes are
made up for at once, in the background; who takes a lost rank is decided when the next attempt starts,
and is seating's.
It starts no attempt by itself: the controller does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import ray
from ray.exceptions import RayActorError

from raymega.errors import CapacityError, ConfigError, Fault, raise_faults
from raymega.messages import Replicas, Report, Requests, StartWorker, StepDone, WorkerDied
from raymega.orchestrate.cluster.node_inventory import list_free_nodes, list_nodes, node_memory
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.worker_group_api import (
    AttemptSpec,
    NodeDrain,
    NoSnapshots,
    SnapshotManager,
)
from raymega.orchestrate.core.worker_status import ANSWER_EVERY_S, Heartbeat
from raymega.orchestrate.workers.actor_calls import ActorCalls, Reports, nothing
from raymega.orchestrate.workers.hang_probe import HangProbe
from raymega.orchestrate.workers.placement_slots import (
    WorkerSlot,
    WorkerSlots,
    abort,
    kill,
    name_of,
)
from raymega.orchestrate.workers.preflight import Preflight, PreflightResult
from raymega.orchestrate.workers.rank_assignment import RankAssignment
from raymega.orchestrate.workers.ray_errors import death_cause
from raymega.orchestrate.workers.snapshot_holders import SnapshotServers
from raymega.plan.run_plan import RunPlan
from raymega.plan.snapshot_replicas import memory_faults

log = logging.getLogger(__name__)

TRAIN_ENTRY = "raymega.train.entry"
RESPAWN_S = 1.0
"""Pause before a process that died without a rank is replaced: its node may be dying too."""
LOOK_EVERY_S = 1.0
"""Between looks at whether a start waits for a slot whose node is gone."""


class RayWorkerGroup:
    """The WorkerGroup protocol over a connected Ray; see group for each verb's timing."""

    def __init__(
        self,
        plan: RunPlan,
        *,
        log_dir: Path,
        can_grow: bool,
        entry: str = TRAIN_ENTRY,
        preflight: Preflight | None = None,
        keepers: SnapshotServers | None = None,
    ) -> None:
        """Starts nothing.

        Args:
            plan: Whose grid and cluster section say what a worker needs.
            log_dir: Where each rank's output goes, on its own node.
            can_grow: Nodes may still join, so that lack of room is a reason to wait.
            entry: Module that a worker runs; see worker.Entry.
            preflight: Asks each node before its first attempt; without one, none is asked.
            keepers: Hold the workers' snapshots; without them, there are none.
        """
        self._plan, self._full, self._asked = plan, plan, plan
        self._log_dir, self._can_grow, self._entry = log_dir, can_grow, entry
        self._slots = WorkerSlots(plan.job.cluster, can_grow=can_grow)
        self._seating = RankAssignment(self._slots, plan)
        self._calls = ActorCalls()
        self._looks = HangProbe(self._calls)
        self._order: AttemptSpec | None = None
        self._preflight, self._keepers = preflight, keepers
        self._rendezvous, self._looked_s, self._renewed_s = "", 0.0, 0.0
        self._is_seated = self._is_let_go = self._is_stepping = self._has_begun = False

    @property
    def keeping(self) -> SnapshotManager:
        """See WorkerGroup."""
        return self._keepers or NoSnapshots()

    def use(self, plan: RunPlan) -> None:
        """See WorkerGroup."""
        self._plan = plan
        self._seating.use(plan.grid)

    def ready(self) -> tuple[WorkerLocation, ...]:
        """See WorkerGroup."""
        return tuple(slot.place for slot in self._slots.ready if slot.place)

    def is_loading(self) -> bool:
        """See WorkerGroup."""
        return bool(self._slots.loading())

    def departure(self) -> NodeDrain | None:
        """See WorkerGroup."""
        going = self._slots.departure(self._block)
        return going and replace(going, is_ready=self._seating.warm_ranks() is not None)

    def reserve(self, timeout_s: float) -> Fault | None:
        """See WorkerGroup."""
        if self._seating.living_ranks() is not None:
            return None
        self._drop_empty_slots()
        self._slots.give_back_half()
        self._renew_lost()
        lacking = None
        try:
            nodes = list_nodes(self._plan.job.cluster)
            node_of = self._seating.nodes_of_ranks(nodes)
            if not self._slots.are_asked_for:
                raise_faults(ConfigError, memory_faults(self._plan, node_of, node_memory()))
        except CapacityError as error:
            if not self._can_grow:
                raise
            lacking = error.faults[0]
        if self._slots.may_be_asked_for:
            # Also when nothing fits yet: what is asked for is what an autoscaler goes by.
            self._ask_for_slots()
        if self._plan is self._asked and self._slots.wait(timeout_s):
            return None
        self._fill_later()
        self._listen(timeout_s)
        if isinstance(lacking, Fault):
            return lacking
        return self._slots.not_free(self._plan.grid, block=self._block)

    def start(self, order: AttemptSpec) -> None:
        """See WorkerGroup."""
        self._order, self._is_seated, self._is_stepping = order, False, False
        is_enough = self._seating.living_ranks() is not None
        if not is_enough:
            self._expect_seats()
            self._fill([slot for slot in self._slots.slots if not slot.is_spare])
        self._seat_when_all_are_there(are_living_enough=is_enough)

    def members(self) -> Mapping[int, WorkerLocation]:
        """See WorkerGroup."""
        return {slot.rank: slot.place for slot in self._slots.slots if slot.seat and slot.place}

    def poll(self, timeout_s: float) -> Reports:
        """See WorkerGroup."""
        reports = self._listen(timeout_s)
        if self._keepers:
            self._keepers.collect()
            self._let_go_when_clear()
        reports += self._renew_lost()
        self._is_stepping |= any(isinstance(report, StepDone) for report in reports)
        if self._is_stepping:  # before that, loading would take its cores from those who start
            self._fill_later()
        return [*self._looks.take(), *reports, *self._missing_nodes()]

    def look(self, silent: Collection[int]) -> None:
        """See WorkerGroup."""
        self._looks.ask(self._slots.slots, silent)

    def request(self, requests: Requests) -> None:
        """See WorkerGroup."""
        attempt = self._order.attempt if self._order else 0
        for slot in self._seating.seated:
            self._calls.make(slot, "set_requests", requests, attempt, answered=nothing)

    def release(self, *, keep_warm: bool) -> None:
        """See WorkerGroup."""
        self._calls.end_attempt()
        attempt = self._order.attempt if self._order else 0
        self._order, self._rendezvous = None, ""
        self._is_seated = self._is_let_go = self._is_stepping = False
        if self._preflight is not None:
            self._preflight.cancel()
        seated = self._seating.seated
        if keep_warm:
            self._kill(self._looks.take_stopped())
            free = abort(seated, attempt)
            stuck = self._slots.stuck(self._plan.job.elastic.start_timeout_s)
            self._kill([*(slot for slot in seated if slot not in free), *stuck])
        for slot in seated:
            slot.seat = None
        if not keep_warm:
            self._calls.clear()
            self._slots.release()
            if self._keepers is not None:
                self._keepers.close()

    @property
    def _block(self) -> int:
        return self._seating.block_of(self._asked.grid)

    def _drop_empty_slots(self) -> None:
        """Slots of another grid in which nobody is left: those of this one are asked for near each other."""
        slots = self._slots.slots
        if self._plan is not self._asked and not any(slot.place for slot in slots):
            self._kill(slots)
            self._slots.release()

    def _ask_for_slots(self) -> None:
        """All of the grid, and beside it what the job's own grid has more, and the spares."""
        self._asked = self._plan
        num_workers = self._asked.grid.world_size
        num_beside = self._full.grid.world_size - num_workers + self._full.job.elastic.spares
        self._slots.ask(
            num_workers=num_workers,
            num_spares=num_beside,
            block=self._block,
            nodes=self._seating.nodes_of_blocks(list_free_nodes(self._plan.job.cluster)),
        )

    def _renew_lost(self) -> list[Report]:
        """Ask anew for slots that went with their node; deaths there that Ray has not told of yet."""
        now_s = time.monotonic()
        if now_s - self._renewed_s < LOOK_EVERY_S:
            return []
        self._renewed_s = now_s
        lost = self._slots.lost()
        untold = [slot.rank for slot in lost if slot.actor is not None and self._is_awaited(slot)]
        self._kill(lost)
        self._slots.ask_anew(lost)
        return [WorkerDied(rank=rank, cause="its node is gone") for rank in untold]

    # Processes.

    def _expect_seats(self) -> None:
        places = self._seating.expect()
        if self._keepers and places:  # they start while workers load torch
            self._keepers.place({place.node_id for place in places})

    def _fill_later(self) -> None:
        """Make up for lost processes, and have spares, while nobody waits for them."""
        now_s = time.monotonic()
        if self._has_begun:
            self._fill([slot for slot in self._slots.slots if now_s >= slot.respawn_at_s])

    def _fill(self, slots: list[WorkerSlot]) -> None:
        """Order a process for each of ``slots`` that has none."""
        self._has_begun = True
        attempt = self._order.attempt if self._order else 0
        for slot in slots:
            if slot.actor is None:
                name = name_of(slot, self._plan, attempt=attempt)
                self._slots.spawn(slot, name=name, entry=self._entry)
                self._calls.make(slot, "hold", answered=nothing, is_of_attempt=False)
                self._calls.make(
                    slot, "preload", self._plan.to_json(), self._slots.device,
                    answered=self._on_warm, is_of_attempt=False,
                )  # fmt: skip
                self._calls.make(slot, "place", answered=self._on_place, is_of_attempt=False)

    def _on_place(self, slot: WorkerSlot, place: WorkerLocation) -> Reports:
        slot.place = place
        if self._is_seated:
            self._place_keepers()
        self._seat_when_all_are_there()
        return []

    def _on_warm(self, slot: WorkerSlot, _answer: None) -> Reports:
        slot.is_warm = True
        self._seat_when_all_are_there()
        self._let_go_when_clear()
        return []

    def _bury(self, slot: WorkerSlot, error: RayActorError) -> list[Report]:
        who = f"process {slot.place.pid} on {slot.place.address}" if slot.place else "a process"
        cause = f"{who} is gone ({death_cause(error)})"
        slot.clear()
        slot.respawn_at_s = time.monotonic() + RESPAWN_S
        if self._is_awaited(slot):
            return [WorkerDied(rank=slot.rank, cause=cause)]
        log.warning("a process without a rank was lost: %s", cause)
        return []

    def _is_awaited(self, slot: WorkerSlot) -> bool:
        """A death is the attempt's when the process had a rank, or when its start waits for it."""
        is_starting = self._order is not None and not self._is_seated
        return slot.seat is not None or (is_starting and not slot.is_spare)

    def _kill(self, slots: list[WorkerSlot]) -> None:
        for slot in slots:
            self._calls.forget(slot)
        kill(slots)

    def _missing_nodes(self) -> list[Report]:
        """A start that waits for a process whose node is gone would wait for ever."""
        now_s = time.monotonic()
        is_due = now_s - self._looked_s >= LOOK_EVERY_S
        if self._is_seated or not self._order or not is_due:
            return []
        self._looked_s = now_s
        if self._slots.are_held:
            return []
        return [WorkerDied(rank=-1, cause="the node of a slot is gone")]

    # Seats, and what a start waits for.

    def _seat_when_all_are_there(self, *, are_living_enough: bool = False) -> None:
        if self._is_seated or self._order is None:
            return
        chosen = self._seating.choose()
        if chosen is None and are_living_enough:
            chosen = self._seating.living_ranks()
        if chosen is None:
            return
        self._is_seated = True
        taken = self._seating.seat(chosen)
        first = taken[0]
        assert first.place, "a slot with a seat has a place"
        self._place_keepers()
        address = first.place.address
        self._calls.make(first, "host_rendezvous", address, answered=self._on_rendezvous)
        if self._preflight is not None:
            self._ask_nodes(self._preflight, taken)

    def _place_keepers(self) -> None:
        """Also where spares are, so that none has to start when one of them is used."""
        if self._keepers:
            self._keepers.place({slot.place.node_id for slot in self._slots.slots if slot.place})

    def _on_rendezvous(self, _host: WorkerSlot, address: str) -> Reports:
        self._rendezvous = address
        self._let_go_when_clear()
        return []

    def _ask_nodes(self, preflight: Preflight, taken: list[WorkerSlot]) -> None:
        """One worker of each node answers for it."""
        by_node = {slot.place.node_id: slot for slot in taken if slot.place}
        addresses = {node: slot.place.address for node, slot in by_node.items() if slot.place}
        question, new = preflight.begin(addresses)
        for node in new:
            self._calls.make(by_node[node], "answer", question, answered=self._on_answer)

    def _on_answer(self, slot: WorkerSlot, answer: PreflightResult) -> Reports:
        assert self._preflight and slot.place, "only a slot with a place was asked"
        reports = self._preflight.take(slot.place.node_id, answer)
        self._let_go_when_clear()
        return [*reports]

    # What workers are told, and what they say.

    def _let_go_when_clear(self) -> None:
        """Workers start, once, when there is a place to meet and nobody is still waited for.

        Who meets waits no longer than for a collective, and lets go of nothing meanwhile: so nobody
        begins before the last process has loaded.
        """
        is_asking = bool(self._preflight and self._preflight.is_open)
        is_keeping = bool(self._keepers and self._keepers.pending())
        is_loading = not all(slot.is_warm for slot in self._seating.seated)
        if self._is_let_go or not self._rendezvous or is_asking or is_keeping or is_loading:
            return
        self._is_let_go = True
        by_rank = sorted(self._seating.seated, key=lambda slot: slot.rank)
        nodes = [slot.place.node_id for slot in by_rank if slot.place]
        for slot in by_rank:
            log_path = self._log_dir / f"rank-{slot.rank:05d}.log"
            message = self._start_message(slot, self._rendezvous, nodes)
            self._calls.make(slot, "start", message, str(log_path), answered=self._on_reports)

    def _start_message(self, slot: WorkerSlot, rendezvous: str, nodes: list[str]) -> StartWorker:
        assert self._order and slot.seat, "an attempt has begun and everybody is seated"
        at, keepers = self._order.holders, self._keepers
        replicas = keepers.replicas(nodes, slot.rank, at) if keepers else Replicas()
        return StartWorker(
            plan_json=self._order.plan_json,
            run_uri=self._order.run_uri,
            attempt=self._order.attempt,
            rank=slot.seat.rank,
            local_rank=slot.seat.local_rank,
            rendezvous=rendezvous,
            restore=self._order.restore,
            device=self._slots.device,
            replicas=replicas,
            passed_over=self._order.passed_over,
        )

    def _on_reports(self, slot: WorkerSlot, reports: list[Report] | None) -> Reports:
        self._calls.make(slot, "next_reports", ANSWER_EVERY_S, answered=self._on_reports)
        return [Heartbeat(rank=slot.rank), *(reports or ())]

    def _listen(self, timeout_s: float) -> Reports:
        """Meet the answers that are there, or the first one to come."""
        starting = self._keepers.pending() if self._keepers else []
        refs = [*self._calls.refs, *starting]
        if not refs:
            return []
        ready, waiting = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if ready and waiting:
            more, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            ready = ready + more
        return [report for ref in ready for report in self._calls.meet(ref, self._bury)]
