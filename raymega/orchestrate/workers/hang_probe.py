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

    def take(self) -> Reports:
        """What was known at once, of processes on the driver's own node; the rest is an answer to a call."""
        known, self._known = self._known, []
        return known

    def take_stopped(self) -> list[WorkerSlot]:
        """Whose process was stopped at the last look; forgets them."""
        stopped, self._stopped = self._stopped, set()
        return [*stopped]

    def ask(self, slots: Sequence[WorkerSlot], silent: Collection[int]) -> None:
        """Ask every rank."""
        for slot in slots:
            if not (slot.seat and slot.place):
                continue
            if slot.rank not in silent:
                self._calls.make(slot, "stand", answered=_on_stand)
                continue
            self._ask_about(slot, slots, silent)

    def _ask_about(
        self, slot: WorkerSlot, slots: Sequence[WorkerSlot], silent: Collection[int]
    ) -> None:
        """The driver looks at what is on its node; elsewhere a process of the run does that answers."""
        assert slot.place, "a rank has a place"
        if slot.place.node_id == ray.get_runtime_context().get_node_id():
            self._known += self._on_state(slot, slot, process_state(slot.place.pid))
            return
        for other in slots:
            is_near = other.place is not None and other.place.node_id == slot.place.node_id
            if is_near and other.is_warm and other.rank not in silent and other is not slot:
                answered = partial(self._on_state, slot)
                self._calls.make(other, "look_at", slot.place.pid, answered=answered)
                return

    def _on_state(self, about: WorkerSlot, _asked: WorkerSlot, state: str) -> Reports:
        (self._stopped.add if state == STOPPED else self._stopped.discard)(about)
        return [ProcessStatus(rank=about.rank, state=state)]


def _on_stand(_slot: WorkerSlot, standing: ThreadStatus) -> Reports:
    return [standing]
