"""The start of an attempt: which process gets which rank, what all wait for, and the messages that start them.

It looks at the slots when the answers that came can have completed them, and never at each answer: so
the cost of a start is linear in the number of ranks. ``workers/ray_worker_group.py`` starts processes and
reads answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray

from raymega.messages import Replicas, Report, StartWorker
from raymega.orchestrate.core.worker_group_api import AttemptSpec
from raymega.orchestrate.workers.actor_calls import ActorCalls, Reports
from raymega.orchestrate.workers.placement_slots import WorkerSlot, WorkerSlots
from raymega.orchestrate.workers.preflight import Preflight, PreflightResult
from raymega.orchestrate.workers.rank_assignment import RankAssignment
from raymega.orchestrate.workers.snapshot_holders import SnapshotServers

LOOK_EVERY_S = 1.0
"""Longest time between two looks at all slots, in seconds: drains change them without an answer."""


class AttemptStart:
    """The start of the present attempt, if there is one; used from one thread, and never blocks."""

    def __init__(  # noqa: PLR0913  # the parts of a worker group that a start touches
        self,
        slots: WorkerSlots,
        assignment: RankAssignment,
        calls: ActorCalls,
        *,
        log_dir: Path,
        preflight: Preflight | None,
        snapshot_servers: SnapshotServers | None,
        on_started: Callable[[WorkerSlot, None], Reports],
    ) -> None:
        """Prepare without an attempt.

        Args:
            slots: Slots of the run.
            assignment: Ranks of these slots.
            calls: Pending calls to the workers.
            log_dir: Folder for each rank's output, on the rank's node.
            preflight: Check of new nodes; None for no check.
            snapshot_servers: Snapshot servers; None for a run without snapshots.
            on_started: Handler of a worker's answer that it has started.
        """
        self._slots, self._assignment, self._calls = slots, assignment, calls
        self._log_dir, self._preflight = log_dir, preflight
        self._snapshot_servers, self._on_started = snapshot_servers, on_started
        self._spec: AttemptSpec | None = None
        self._rendezvous = ""
        self._holders: Collection[WorkerSlot] = ()  # with a state of the attempt before
        # of the attempt: ranks assigned, workers told to start
        self.is_assigned = self._is_let_go = False
        # answers so far, the number of them from which on a look at the slots may succeed, time of the last look
        self._num_answers, self._due_at, self._probed_s = 0, 0, 0.0
        self._num_pending = 0  # snapshot servers that had not answered at the last look

    def begin(
        self, spec: AttemptSpec, *, holders: Mapping[WorkerSlot, int], are_living_enough: bool
    ) -> None:
        """Begin the start of an attempt; with ``are_living_enough`` on the processes that live already.

        ``holders`` has the steps of the states that slots hold of the attempt before, -1 for none.
        """
        self._spec, self.is_assigned, self._is_let_go = spec, False, False
        self._holders = {slot for slot, step in holders.items() if step >= 0}
        self._assign(are_living_enough=are_living_enough)

    def end(self) -> None:
        """Forget the attempt."""
        self._spec, self._rendezvous = None, ""
        self.is_assigned = self._is_let_go = False
        if self._preflight is not None:
            self._preflight.cancel()

    def held(self, steps: Mapping[WorkerSlot, int]) -> dict[WorkerSlot, int]:
        """Return the ``steps`` of slots that count, by the answers to the attempt's abort.

        Until workers are told to start, one that is no holder still has a state of some earlier attempt.
        """
        return {
            slot: step if self._is_let_go or slot in self._holders else -1
            for slot, step in steps.items()
        }

    def count_answer(self, slot: WorkerSlot) -> None:
        """Note that a process told its location, or that it has loaded."""
        self._num_answers += 1
        servers = self._snapshot_servers
        if servers and self.is_assigned and slot.location:  # a spare's, as it may be used later
            servers.add(slot.location.node_id)

    def proceed(self) -> None:
        """Assign ranks, and start the workers, if what they wait for has come; called once a poll."""
        if self._spec is None or self._is_let_go:
            return
        is_late = time.monotonic() - self._probed_s >= LOOK_EVERY_S
        is_kept = self._has_new_server()
        if not (self._num_answers >= self._due_at or is_kept or is_late):
            return
        self._probed_s = time.monotonic()
        if not self.is_assigned:
            self._assign(are_living_enough=False)
        if self.is_assigned:
            self._let_go_when_clear()

    # Ranks.

    def _assign(self, *, are_living_enough: bool) -> None:
        chosen = self._assignment.choose()
        if chosen is None and are_living_enough:
            chosen = self._assignment.living_ranks()
        if chosen is None:
            self._due_at = self._num_answers + self._assignment.num_lacking()
            return
        self.is_assigned = True  # from here: snapshot servers, rendezvous and preflight at once
        taken = self._assignment.assigned(chosen)
        first = taken[0]
        assert first.location, "a slot with a seat has a place"
        if self._snapshot_servers:  # on each node with a process, spares included
            slots = self._slots.slots
            nodes = {slot.location.node_id for slot in slots if slot.location}
            self._snapshot_servers.location(nodes)
        address = first.location.address
        self._calls.submit(first, "host_rendezvous", address, on_result=self._on_rendezvous)
        if self._preflight is not None:
            self._ask_nodes(self._preflight, taken)
        self._expect_loads()

    def _on_rendezvous(self, _host: WorkerSlot, address: str) -> Reports:
        self._rendezvous = address
        self._due_at = 0
        return []

    def _ask_nodes(self, preflight: Preflight, taken: list[WorkerSlot]) -> None:
        """Begin the preflight check; one worker of each node answers for it."""
        by_node = {slot.location.node_id: slot for slot in taken if slot.location}
        addresses = {node: slot.location.address for node, slot in by_node.items() if slot.location}
        check, new = preflight.begin(addresses)
        for node in new:
            self._calls.submit(by_node[node], "answer", check, on_result=self._on_answer)

    def _on_answer(self, slot: WorkerSlot, answer: PreflightResult) -> Reports:
        assert self._preflight and slot.location, "only a slot with a place was asked"
        reports: list[Report] = [*self._preflight.add(slot.location.node_id, answer)]
        self._due_at = 0
        return [*reports]

    # The order to train.

    def _has_new_server(self) -> bool:
        """Return whether the number of snapshot servers that are waited for has changed."""
        if not self._snapshot_servers:
            return False
        before, self._num_pending = self._num_pending, len(self._snapshot_servers.pending())
        return before != self._num_pending

    def _expect_loads(self) -> bool:
        """Return whether processes with a rank still load; then the next look waits for as many answers."""
        num_loading = sum(
            slot.assigned is not None and not slot.is_warm for slot in self._slots.slots
        )
        self._due_at = self._num_answers + num_loading
        return num_loading > 0

    def _let_go_when_clear(self) -> None:
        """Start the workers, once: after rendezvous, preflight and snapshot servers, when all processes have loaded.

        A rank in the rendezvous waits at most elastic.collective_timeout_s and cannot be aborted there, so no
        rank may enter it before the last process has loaded.
        """
        is_loading = self._expect_loads()
        is_asking = bool(self._preflight and self._preflight.is_open)
        is_keeping = bool(self._snapshot_servers and self._snapshot_servers.pending())
        if not self._rendezvous or is_asking or is_keeping or is_loading:
            return
        self._is_let_go = True
        by_rank = sorted(self._assignment.assigned_slots, key=lambda slot: slot.rank)
        for slot, message, shared in self._messages(by_rank):
            log_path = str(self._log_dir / f"rank-{slot.rank:05d}.log")
            self._calls.submit(
                slot, "start", message, log_path, *shared, on_result=self._on_started
            )

    def _messages(
        self, by_rank: list[WorkerSlot]
    ) -> list[tuple[WorkerSlot, StartWorker, tuple[Any, ...]]]:
        """Return each worker's start message, and the arguments that all of them share."""
        assert self._spec, "an attempt has begun"
        nodes = [slot.location.node_id for slot in by_rank if slot.location]
        servers, holders = self._snapshot_servers, self._spec.holders
        replicas = servers.replicas(nodes) if servers else [Replicas()] * len(by_rank)
        # the map of a whole snapshot: once into Ray's store, and from there once to each node
        shared = (ray.put(holders),) if servers and holders.servers else ()
        build = partial(
            self._spec.start_message, rendezvous=self._rendezvous, device=self._slots.device
        )
        return [
            (slot, build(slot.assigned, replicas=own, is_holder=slot in self._holders), shared)
            for slot, own in zip(by_rank, replicas, strict=True)
            if slot.assigned
        ]
