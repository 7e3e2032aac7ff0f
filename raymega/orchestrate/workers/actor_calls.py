"""The driver's calls into its workers' processes: which are in flight, who meets each answer, and its lack.

A call that never answers is how a death shows: the process that made it fail is gone. Where
processes come from is placement_slots'; what an answer means is the group's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raymega.messages import Report, WorkerFailed
from raymega.orchestrate.core.worker_group_api import ProcessStatus, ThreadStatus, WorkerStatus
from raymega.orchestrate.workers.placement_slots import WorkerSlot
from raymega.orchestrate.workers.thread_status import STOPPED, process_state
from raymega.orchestrate.workers.worker_actor import last_words

FETCH_TIMEOUT_S = 30.0
ABORT_PATIENCE_S = 2.0
ANSWER_MARGIN_S = 1.0
MAX_CAUSE_LENGTH = 300

Reports = list[Report | WorkerStatus]
Meet = Callable[[WorkerSlot, Any], Reports]  # answers differ by call
Died = Callable[[WorkerSlot, RayActorError], list[Report]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """To whom, what to do with its answer, and whether it ends with the attempt."""

    slot: WorkerSlot
    on_result: Meet
    is_of_attempt: bool


class ActorCalls:
    """Calls in flight; from one thread, and nothing here blocks."""

    def __init__(self) -> None:
        self._calls: dict[ray.ObjectRef[Any], _Call] = {}

    @property
    def refs(self) -> list[ray.ObjectRef[Any]]:
        """What to wait for."""
        return [*self._calls]

    def submit(
        self,
        slot: WorkerSlot,
        method: str,
        *args: object,
        on_result: Meet,
        is_of_attempt: bool = True,
    ) -> None:
        """Call the slot's process, if it has one."""
        if slot.actor is not None:
            ref = getattr(slot.actor, method).remote(*args)
            self._calls[ref] = _Call(slot=slot, on_result=on_result, is_of_attempt=is_of_attempt)

    def handle_result(self, ref: ray.ObjectRef[Any], died: Died) -> Reports:
        """Deal with one answer, or with its absence: then ``died`` is called, once a process."""
        call = self._calls.pop(ref, None)
        if call is None:
            return []
        try:
            answer = ray.get(ref, timeout=FETCH_TIMEOUT_S)
        except RayActorError as error:
            self.forget(call.slot)
            return [*died(call.slot, error)]
        except (RayTaskError, GetTimeoutError) as error:
            return [_broken_call(call.slot.rank, error)]
        return call.on_result(call.slot, answer)

    def forget(self, slot: WorkerSlot) -> None:
        """Its process is gone, and so are its answers."""
        self._keep(lambda call: call.slot is not slot)

    def end_attempt(self) -> None:
        """Nobody waits any more for what the attempt's workers would have said."""
        self._keep(lambda call: not call.is_of_attempt)

    def clear(self) -> None:
        """Nobody waits for anything."""
        self._calls.clear()

    def _keep(self, is_kept: Callable[[_Call], bool]) -> None:
        self._calls = {ref: call for ref, call in self._calls.items() if is_kept(call)}


class HangProbe:
    """Asks ranks that may hang where their thread stands, and processes on the same node about silent ones.

    It remembers whose process was found stopped. What the answers mean is hang_detector's.
    """

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


def nothing(_slot: WorkerSlot, _answer: object) -> Reports:
    """What to do with an answer that says nothing."""
    return []


def _on_thread_status(_slot: WorkerSlot, standing: ThreadStatus) -> Reports:
    return [standing]


def abort(assigned_slots: Sequence[WorkerSlot], attempt: int) -> list[WorkerSlot]:
    """Have workers let go of ``attempt``; the slots whose process did so in time."""
    refs: dict[ray.ObjectRef[bool], WorkerSlot] = {
        slot.actor.abort.remote(ABORT_PATIENCE_S, attempt): slot
        for slot in assigned_slots
        if slot.actor is not None and slot.location is not None
    }
    if not refs:
        return []
    patience_s = ABORT_PATIENCE_S + ANSWER_MARGIN_S
    answered, _ = ray.wait(list(refs), num_returns=len(refs), timeout=patience_s)
    return [refs[ref] for ref in answered if _is_true(ref)]


def _is_true(ref: ray.ObjectRef[bool]) -> bool:
    """The answer; a death or an error is a no."""
    try:
        return bool(ray.get(ref, timeout=FETCH_TIMEOUT_S))
    except (RayActorError, RayTaskError, GetTimeoutError):
        return False


def _broken_call(rank: int, error: Exception) -> WorkerFailed:
    """An error outside the training thread: the driver's own calls into a living worker."""
    cause = getattr(error, "cause", None) or error
    return replace(last_words(rank, 0, cause), traceback=str(error), is_secondary=False)


def death_cause(error: RayActorError) -> str:
    """What Ray knows of a death, without ids before it and general advice behind it."""
    text = " ".join(str(error).split())
    *_, detail = re.split(r"Worker exit detail: | ip: \S+ ", text)
    return detail.partition(" Some common causes")[0].rstrip(".")[:MAX_CAUSE_LENGTH]
