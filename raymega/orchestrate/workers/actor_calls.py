"""The driver's pending calls to worker actors, and the function that handles each answer.

A call that fails reports the end of its process. ``workers/placement_slots.py`` starts the processes;
``workers/ray_worker_group.py`` handles the answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raymega.errors import one_line
from raymega.messages import Report, WorkerFailed
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.core.worker_group_api import ProcessStatus, WorkerStatus
from raymega.orchestrate.workers.placement_slots import WorkerSlot
from raymega.orchestrate.workers.thread_status import STOPPED, process_state
from raymega.orchestrate.workers.worker_actor import last_words

FETCH_TIMEOUT_S = 30.0
ABORT_PATIENCE_S = 2.0
ANSWER_MARGIN_S = 1.0
MAX_CAUSE_LENGTH = 300

Reports = list[Report | WorkerStatus]
Meet = Callable[[WorkerSlot, Any], Reports]  # answers differ by call
Died = Callable[[WorkerSlot, RayError], list[Report]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A pending call: its slot, the handler of its answer, and whether it is dropped with the attempt."""

    slot: WorkerSlot
    on_result: Meet
    is_of_attempt: bool


class ActorCalls:
    """All pending calls; used from one thread, and no method blocks for long."""

    def __init__(self) -> None:
        self._calls: dict[ray.ObjectRef[Any], _Call] = {}
        self._holds: dict[ray.ObjectRef[Any], _Call] = {}  # calls that end with their process

    def refs(self, *, with_holds: bool) -> list[ray.ObjectRef[Any]]:
        """Return the refs of the pending calls, for ``ray.wait``."""
        return [*self._calls, *self._holds] if with_holds else [*self._calls]

    def submit(
        self,
        slot: WorkerSlot,
        method: str,
        *args: object,
        on_result: Meet,
        is_of_attempt: bool = True,
    ) -> None:
        """Call ``method`` of the slot's actor, if it has one; ``on_result`` handles the answer."""
        if slot.actor is not None:
            ref = getattr(slot.actor, method).remote(*args)
            calls = self._holds if method == "hold" else self._calls
            calls[ref] = _Call(slot=slot, on_result=on_result, is_of_attempt=is_of_attempt)

    def handle_result(self, ref: ray.ObjectRef[Any], died: Died) -> Reports:
        """Handle one finished call and return its reports; ``died`` handles the end of a process, once."""
        call = self._calls.pop(ref, None) or self._holds.pop(ref, None)
        if call is None:
            return []
        try:
            answer = ray.get(ref, timeout=FETCH_TIMEOUT_S)
        except (RayTaskError, GetTimeoutError) as error:
            return [broken_call(call.slot.rank, error)]
        # the process ended, of which few causes are a RayActorError: its other calls would fail too
        except RayError as error:
            self.forget(call.slot)
            return [*died(call.slot, error)]
        return call.on_result(call.slot, answer)

    def forget(self, *slots: WorkerSlot) -> None:
        """Drop all calls to the processes of ``slots``."""
        gone = set(slots)
        if gone:
            self._keep(lambda call: call.slot not in gone)

    def end_attempt(self) -> None:
        """Drop the calls of the present attempt; later answers to them are ignored."""
        self._keep(lambda call: not call.is_of_attempt)

    def clear(self) -> None:
        """Drop all calls."""
        self._calls.clear()
        self._holds.clear()

    def _keep(self, is_kept: Callable[[_Call], bool]) -> None:
        self._calls = {ref: call for ref, call in self._calls.items() if is_kept(call)}
        self._holds = {ref: call for ref, call in self._holds.items() if is_kept(call)}


class HangProbe:
    """Asks ranks for their ThreadStatus, and other processes on the node for that of silent ones.

    It remembers which processes were found stopped. ``driver/hang_detector.py`` interprets the answers.
    """

    def __init__(self, calls: ActorCalls) -> None:
        self._calls = calls
        self._known: Reports = []
        self._stopped: set[WorkerSlot] = set()

    def pop_results(self) -> Reports:
        """Return the statuses of processes on the driver's node, which needed no call."""
        known, self._known = self._known, []
        return known

    def pop_stopped(self) -> list[WorkerSlot]:
        """Return the slots whose process was stopped at the last look, and forget them."""
        stopped, self._stopped = self._stopped, set()
        return [*stopped]

    def ask(self, slots: Sequence[WorkerSlot], silent: Collection[int]) -> None:
        """Request the status of every rank's thread, or of its process if the rank is ``silent``."""
        # on each node the first loaded process that is not silent answers for those that are
        witnesses: dict[str, WorkerSlot] = {}
        for slot in slots if silent else ():
            if slot.location and slot.is_warm and slot.rank not in silent:
                witnesses.setdefault(slot.location.node_id, slot)
        for slot in slots:
            if not (slot.assigned and slot.location):
                continue
            if slot.rank not in silent:
                self._calls.submit(slot, "thread_status", on_result=lambda _, status: [status])
            else:
                self._ask_about(slot, slot.location, witnesses)

    def _ask_about(
        self, slot: WorkerSlot, location: WorkerLocation, witnesses: Mapping[str, WorkerSlot]
    ) -> None:
        """Request the state of a silent rank's process from the witness on its node."""
        # on the driver's node: the driver itself looks
        if location.node_id == ray.get_runtime_context().get_node_id():
            self._known += self._on_state(slot, slot, process_state(location.pid))
        elif location.node_id in witnesses:
            on_result = partial(self._on_state, slot)
            witness = witnesses[location.node_id]
            self._calls.submit(witness, "process_status", location.pid, on_result=on_result)

    def _on_state(self, about: WorkerSlot, _asked: WorkerSlot, state: str) -> Reports:
        (self._stopped.add if state == STOPPED else self._stopped.discard)(about)
        return [ProcessStatus(rank=about.rank, state=state)]


def nothing(_slot: WorkerSlot, _answer: object) -> Reports:
    """Handle an answer without content: return no reports."""
    return []


def abort(assigned_slots: Sequence[WorkerSlot], attempt: int) -> dict[WorkerSlot, int]:
    """Abort ``attempt`` on all workers; return the slots whose training thread ended in time.

    Each has the step of the state that its process holds, -1 for none.
    """
    # all at once, then one deadline for all
    refs: dict[ray.ObjectRef[int | None], WorkerSlot] = {
        slot.actor.abort.remote(ABORT_PATIENCE_S, attempt): slot
        for slot in assigned_slots
        if slot.actor is not None and slot.location is not None
    }
    if not refs:
        return {}
    patience_s = ABORT_PATIENCE_S + ANSWER_MARGIN_S
    answered, _ = ray.wait(list(refs), num_returns=len(refs), timeout=patience_s)
    steps = {refs[ref]: _answer_or_none(ref) for ref in answered}
    return {slot: step for slot, step in steps.items() if step is not None}


def _answer_or_none(ref: ray.ObjectRef[int | None]) -> int | None:
    """Return the answer; None if the process died or the call failed."""
    try:
        return ray.get(ref, timeout=FETCH_TIMEOUT_S)
    except RayError:
        return None


def broken_call(rank: int, error: Exception) -> WorkerFailed:
    """Return the report of a call to a live worker that failed, outside its training thread."""
    cause = getattr(error, "cause", None) or error
    return replace(last_words(rank, 0, cause), traceback=str(error), is_secondary=False)


def death_cause(error: RayError) -> str:
    """Return Ray's cause of an actor's death, without the ids before it and the general advice after it."""
    text = one_line(error)
    *_, detail = re.split(r"Worker exit detail: | ip: \S+ ", text)
    return detail.partition(" Some common causes")[0].rstrip(".")[:MAX_CAUSE_LENGTH]
