"""Asks ranks that may hang for their thread status, and processes on the same node about silent ones.

What the answers mean is watch's. Nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import ray

from raymega.orchestrate.core.worker_status import ProcessStatus, ThreadStatus
from raymega.orchestrate.workers.actor_calls import ActorCalls, Reports
from raymega.orchestrate.workers.placement_slots import WorkerSlot
from raymega.orchestrate.workers.thread_status import STOPPED, process_state


class HangProbe:
    """Asks, and remembers whose process was found stopped."""

    def __init__(self, calls: ActorCalls) -> None:
        self._calls = calls
        self._known: Reports = []
        self._stopped: set[WorkerSlot] = set()

    def pop_results(self) -> Reports:
        """Return what was known at once of processes on the driver's node; the rest comes as results of calls."""
        known, self._known = self._known, []
        return known

    def pop_stopped(self) -> list[WorkerSlot]:
        """Whose process was stopped at the last look; forgets them."""
        stopped, self._stopped = self._stopped, set()
        return [*stopped]

    def ask(self, slots: Sequence[WorkerSlot], silent: Collection[int]) -> None:
        """Ask every rank."""
        for slot in slots:
            if not (slot.assigned and slot.location):
                continue
            if slot.rank not in silent:
                self._calls.submit(slot, "thread_status", on_result=_on_thread_status)
                continue
            self._ask_about(slot, slots, silent)

    def _ask_about(
        self, slot: WorkerSlot, slots: Sequence[WorkerSlot], silent: Collection[int]
    ) -> None:
        """The driver looks at what is on its node; elsewhere a process of the run does that answers."""
        assert slot.location, "a rank has a place"
        if slot.location.node_id == ray.get_runtime_context().get_node_id():
            self._known += self._on_state(slot, slot, process_state(slot.location.pid))
            return
        for other in slots:
            is_near = other.location is not None and other.location.node_id == slot.location.node_id
            if is_near and other.is_warm and other.rank not in silent and other is not slot:
                on_result = partial(self._on_state, slot)
                self._calls.submit(other, "process_status", slot.location.pid, on_result=on_result)
                return

    def _on_state(self, about: WorkerSlot, _asked: WorkerSlot, state: str) -> Reports:
        (self._stopped.add if state == STOPPED else self._stopped.discard)(about)
        return [ProcessStatus(rank=about.rank, state=state)]


def _on_thread_status(_slot: WorkerSlot, standing: ThreadStatus) -> Reports:
    return [standing]
