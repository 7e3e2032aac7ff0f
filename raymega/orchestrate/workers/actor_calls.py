"""The driver's calls into its workers' processes: which are in flight, and who meets each answer.

A call that never answers is how a death shows: the process that made it fail is gone. Where
processes come from is slots'; what an answer means is the group's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raymega.messages import Report
from raymega.orchestrate.core.worker_status import WorkerStatus
from raymega.orchestrate.workers.placement_slots import WorkerSlot
from raymega.orchestrate.workers.ray_errors import FETCH_TIMEOUT_S, broken_call

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
            return [broken_call(call.slot.rank, error)]
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


def nothing(_slot: WorkerSlot, _answer: object) -> Reports:
    """What to do with an answer that says nothing."""
    return []
