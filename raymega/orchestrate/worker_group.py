"""The worker group on Ray: one placement group, one actor a rank, one place where it waits.

It owns actors, slots and the calls in flight. Every answer is met in poll by the function that was
named when the call was made; a call that never answers is how a death shows. It restarts nothing
by itself: the controller does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raymega.errors import CapacityError, ConfigError, Fault, raise_faults
from raymega.messages import Replicas, Report, Requests, StartWorker, WorkerDied
from raymega.orchestrate.group import AttemptOrder, NoSnapshots, SnapshotKeeping
from raymega.orchestrate.inventory import (
    Device,
    find_device,
    list_nodes,
    node_memory,
    worker_resources,
)
from raymega.orchestrate.keepers import Keepers
from raymega.orchestrate.placement import (
    Place,
    Seat,
    assign_seats,
    block_size,
    keep_seats,
    place_ranks,
)
from raymega.orchestrate.preflight import Answer, Preflight
from raymega.orchestrate.ray_errors import FETCH_TIMEOUT_S, broken_call, death_cause, is_true
from raymega.orchestrate.worker import MAX_CONCURRENCY, Worker
from raymega.plan.replicas import memory_faults
from raymega.plan.run_plan import RunPlan

log = logging.getLogger(__name__)

TRAIN_ENTRY = "raymega.train.entry"
NAMED_AXES = ("tp", "pp", "dp")
LONG_POLL_S = 1.0
ABORT_PATIENCE_S = 2.0
ANSWER_MARGIN_S = 1.0


@dataclass(kw_only=True, slots=True)
class _Slot:
    """One worker's share of the placement group, and who sits in it.

    ``home`` is the rank that it had last, or is expected to get; -1 before anything is known.
    """

    index: int
    home: int = -1
    actor: ActorHandle[Any] | None = None  # an actor class made at run time has no static type
    place: Place | None = None
    seat: Seat | None = None

    @property
    def rank(self) -> int:
        return self.seat.rank if self.seat else -1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A call in flight: to whom, and what to do with its answer."""

    slot: _Slot
    answered: Callable[[_Slot, Any], list[Report]]  # answers differ by call


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
        keepers: Keepers | None = None,
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
        self._plan, self._cluster, self._grid = plan, plan.job.cluster, plan.grid
        self._log_dir, self._can_grow, self._entry = log_dir, can_grow, entry
        self._is_tp_free = plan.job.parallel.is_tp_across_nodes_allowed
        self._block = block_size(self._grid, is_tp_across_nodes_allowed=self._is_tp_free)
        self._device: Device = "cpu"
        self._reserved: PlacementGroup | None = None
        self._slots = [_Slot(index=index) for index in range(self._grid.world_size)]
        self._calls: dict[ray.ObjectRef[Any], _Call] = {}
        self._order: AttemptOrder | None = None
        self._preflight, self._keepers = preflight, keepers
        self._rendezvous, self._is_let_go = "", False

    @property
    def keeping(self) -> SnapshotKeeping:
        """See WorkerGroup."""
        return self._keepers or NoSnapshots()

    def reserve(self, timeout_s: float) -> Fault | None:
        """See WorkerGroup."""
        lacking = None
        try:
            node_of = place_ranks(list_nodes(self._cluster), self._grid, **self._placement_rule)
            if self._reserved is None:
                raise_faults(ConfigError, memory_faults(self._plan, node_of, node_memory()))
        except CapacityError as error:
            if not self._can_grow:
                raise
            lacking = error.faults[0]
        if self._reserved is None:
            # Also when nothing fits yet: what is asked for is what an autoscaler goes by.
            self._reserved = self._ask_for_slots()
        if self._reserved.wait(timeout_s):
            return None
        return lacking if isinstance(lacking, Fault) else self._not_free()

    def start(self, order: AttemptOrder) -> None:
        """See WorkerGroup."""
        self._order = order
        if any(slot.home < 0 for slot in self._slots):
            self._expect_seats()
        for slot in self._slots:
            if slot.actor is None:
                slot.actor = self._spawn(slot)
                self._call(slot, "preload", answered=_nothing)
                self._call(slot, "place", answered=self._on_place)
        self._seat_when_all_are_there()

    def members(self) -> Mapping[int, Place]:
        """See WorkerGroup."""
        return {slot.rank: slot.place for slot in self._slots if slot.seat and slot.place}

    def poll(self, timeout_s: float) -> list[Report]:
        """See WorkerGroup."""
        starting = self._keepers.pending() if self._keepers else []
        ready, waiting = ray.wait([*self._calls, *starting], num_returns=1, timeout=timeout_s)
        if ready and waiting:
            more, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            ready = ready + more
        if self._keepers:
            self._keepers.collect()
            self._let_go_when_clear()
        return [report for ref in ready for report in self._meet(ref)]

    def request(self, requests: Requests) -> None:
        """See WorkerGroup."""
        for slot in self._slots:
            self._call(slot, "set_requests", requests, answered=_nothing)

    def release(self, *, keep_warm: bool) -> None:
        """See WorkerGroup."""
        self._calls.clear()
        self._order, self._rendezvous, self._is_let_go = None, "", False
        if self._preflight is not None:
            self._preflight.cancel()
        free = self._abort_all() if keep_warm else set()
        for slot in self._slots:
            slot.seat = None
            if slot.index not in free:
                self._kill(slot)
        if not keep_warm and self._reserved is not None:
            remove_placement_group(self._reserved)
            self._reserved = None
        if not keep_warm and self._keepers is not None:
            self._keepers.close()

    @property
    def _placement_rule(self) -> dict[str, bool]:
        return {"is_tp_across_nodes_allowed": self._is_tp_free}

    def _ask_for_slots(self) -> PlacementGroup:
        """One bundle for each set of workers that must share a node, so that Ray cannot part it."""
        self._device = find_device(self._cluster)
        if (self._cluster.device, self._device, self._can_grow) == ("auto", "cpu", True):
            log.warning(
                "cluster.device=auto takes cpu: no node has a GPU, and Ray knows of no node type with "
                "one; set cluster.device=cuda to wait for GPU nodes"
            )
        needs = worker_resources(self._device, self._cluster.cpus_per_worker)
        bundle = {kind: round(amount * self._block, 4) for kind, amount in needs.items()}
        bundles = [bundle] * (self._grid.world_size // self._block)
        return cast(PlacementGroup, placement_group(bundles, strategy="PACK"))

    def _expect_seats(self) -> None:
        """Ranks by where Ray has put the bundles: Ray renames nothing, so actors need theirs now."""
        assert self._reserved, "start follows a reserve that held the slots"
        table = placement_group_table(self._reserved)
        nodes = table["bundles_to_node_id"]
        places = [
            Place(node_id=nodes[slot.index // self._block], address="", pid=0)
            for slot in self._slots
        ]
        seats = assign_seats(places, self._grid, **self._placement_rule)
        for slot, seat in zip(self._slots, seats, strict=True):
            slot.home = seat.rank
        if self._keepers:  # they start while workers load torch
            self._keepers.place({place.node_id for place in places})

    def _not_free(self) -> Fault:
        free = ray.available_resources()  # type: ignore[no-untyped-call]
        needs = worker_resources(self._device, self._cluster.cpus_per_worker)
        shown = ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in needs)
        each = ", ".join(f"{amount:g} {kind}" for kind, amount in needs.items())
        return Fault(
            fact=f"the cluster has {shown} free",
            rule=f"grid {self._grid.describe()} needs {self._grid.world_size} workers of {each} "
            f"each, {self._block} together on a node",
            remedy="wait for other jobs, add nodes, or raise cluster.capacity_timeout_s",
        )

    def _spawn(self, slot: _Slot) -> ActorHandle[Any]:
        """A new process. Ray sets OMP_NUM_THREADS to its whole CPUs, at least 1, unless it is set.

        A runtime environment would do no more, and would keep Ray from using an idle process. Its
        name is for people: run, attempt it was made for, rank and coordinates.
        """
        assert self._reserved and self._order, "start follows a reserve that held the slots"
        options = {
            "name": actor_name(self._plan, attempt=self._order.attempt, rank=slot.home),
            "num_cpus": self._cluster.cpus_per_worker,
            "num_gpus": 1 if self._device == "cuda" else 0,
            "max_concurrency": MAX_CONCURRENCY,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._reserved,
                placement_group_bundle_index=slot.index // self._block,
            ),
        }
        return cast(ActorHandle[Any], ray.remote(Worker).options(**options).remote(self._entry))

    def _call(
        self,
        slot: _Slot,
        method: str,
        *args: object,
        answered: Callable[[_Slot, Any], list[Report]],
    ) -> None:
        if slot.actor is not None:
            ref = getattr(slot.actor, method).remote(*args)
            self._calls[ref] = _Call(slot=slot, answered=answered)

    def _meet(self, ref: ray.ObjectRef[Any]) -> list[Report]:
        """Deal with one answer, or with its absence."""
        call = self._calls.pop(ref, None)
        if call is None:
            return []
        try:
            answer = ray.get(ref, timeout=FETCH_TIMEOUT_S)
        except RayActorError as error:
            return [self._bury(call.slot, error)]
        except (RayTaskError, GetTimeoutError) as error:
            return [broken_call(call.slot.rank, error)]
        return call.answered(call.slot, answer)

    def _bury(self, slot: _Slot, error: RayActorError) -> WorkerDied:
        self._calls = {ref: call for ref, call in self._calls.items() if call.slot is not slot}
        who = f"process {slot.place.pid} on {slot.place.address}" if slot.place else "a process"
        slot.actor, slot.place = None, None
        return WorkerDied(rank=slot.rank, cause=f"{who} is gone ({death_cause(error)})")

    def _on_place(self, slot: _Slot, place: Place) -> list[Report]:
        slot.place = place
        self._seat_when_all_are_there()
        return []

    def _seat_when_all_are_there(self) -> None:
        places = [slot.place for slot in self._slots if slot.place]
        if len(places) < len(self._slots):
            return
        homes = [slot.home for slot in self._slots]
        seats = keep_seats(places, homes, self._grid, **self._placement_rule)
        if seats is None:
            seats = assign_seats(places, self._grid, **self._placement_rule)
            log.warning("GPUs or nodes came in another order: some actors' names say other ranks")
        for slot, seat in zip(self._slots, seats, strict=True):
            slot.seat, slot.home = seat, seat.rank
        first = next(slot for slot in self._slots if slot.rank == 0)
        assert first.place, "a slot with a seat has a place"
        if self._keepers:
            self._keepers.place({place.node_id for place in places})
        self._call(first, "host_rendezvous", first.place.address, answered=self._on_rendezvous)
        if self._preflight is not None:
            self._ask_nodes(self._preflight)

    def _on_rendezvous(self, _host: _Slot, address: str) -> list[Report]:
        self._rendezvous = address
        self._let_go_when_clear()
        return []

    def _ask_nodes(self, preflight: Preflight) -> None:
        """One worker of each node answers for it."""
        by_node = {slot.place.node_id: slot for slot in self._slots if slot.place}
        addresses = {node: slot.place.address for node, slot in by_node.items() if slot.place}
        question, new = preflight.begin(addresses)
        for node in new:
            self._call(by_node[node], "answer", question, answered=self._on_answer)

    def _on_answer(self, slot: _Slot, answer: Answer) -> list[Report]:
        assert self._preflight and slot.place, "only a slot with a place was asked"
        reports = self._preflight.take(slot.place.node_id, answer)
        self._let_go_when_clear()
        return [*reports]

    def _let_go_when_clear(self) -> None:
        """Workers start, once, when there is a place to meet and no node is still waited for."""
        is_asking = bool(self._preflight and self._preflight.is_open)
        is_keeping = bool(self._keepers and self._keepers.pending())
        if self._is_let_go or not self._rendezvous or is_asking or is_keeping:
            return
        self._is_let_go = True
        by_rank = sorted(self._slots, key=lambda slot: slot.rank)
        nodes = [slot.place.node_id for slot in by_rank if slot.place]
        for slot in self._slots:
            log_path = self._log_dir / f"rank-{slot.rank:05d}.log"
            message = self._start_message(slot, self._rendezvous, nodes)
            self._call(slot, "start", message, str(log_path), answered=self._on_started)

    def _start_message(self, slot: _Slot, rendezvous: str, nodes: list[str]) -> StartWorker:
        assert self._order and slot.seat, "an attempt has begun and everybody is seated"
        replicas = Replicas()
        if self._keepers:
            replicas = self._keepers.replicas(nodes, slot.rank, self._order.holders)
        return StartWorker(
            plan_json=self._order.plan_json,
            run_uri=self._order.run_uri,
            attempt=self._order.attempt,
            rank=slot.seat.rank,
            local_rank=slot.seat.local_rank,
            rendezvous=rendezvous,
            restore=self._order.restore,
            device=self._device,
            replicas=replicas,
        )

    def _on_started(self, slot: _Slot, _answer: None) -> list[Report]:
        return self._on_reports(slot, [])

    def _on_reports(self, slot: _Slot, reports: list[Report]) -> list[Report]:
        self._call(slot, "next_reports", LONG_POLL_S, answered=self._on_reports)
        return reports

    def _abort_all(self) -> set[int]:
        """Indices of the slots whose process let go of its work in time."""
        refs: dict[ray.ObjectRef[bool], int] = {
            slot.actor.abort.remote(ABORT_PATIENCE_S): slot.index
            for slot in self._slots
            if slot.actor is not None and slot.place is not None
        }
        if not refs:
            return set()
        patience_s = ABORT_PATIENCE_S + ANSWER_MARGIN_S
        answered, _ = ray.wait(list(refs), num_returns=len(refs), timeout=patience_s)
        return {refs[ref] for ref in answered if is_true(ref)}

    def _kill(self, slot: _Slot) -> None:
        if slot.actor is not None:
            ray.kill(slot.actor)
        slot.actor, slot.place = None, None


def actor_name(plan: RunPlan, *, attempt: int, rank: int) -> str:
    """Such as ``demo/a1/rank3-tp1-pp0-dp1``."""
    coords = plan.grid.coords(rank)
    axes = [f"{axis}{coords.on(axis)}" for axis in NAMED_AXES]
    return "/".join((plan.job.run.name, f"a{attempt}", "-".join((f"rank{rank}", *axes))))


def _nothing(_slot: _Slot, _answer: object) -> list[Report]:
    return []
