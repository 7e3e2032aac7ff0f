"""Only what needs no Ray; the rest is in tests/ray."""

from types import SimpleNamespace

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from raymega.messages import WorkerFailed
from raymega.orchestrate.workers import actor_calls
from raymega.orchestrate.workers.actor_calls import ActorCalls, abort, death_cause, nothing
from raymega.orchestrate.workers.placement_slots import WorkerSlot

KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: Worker
\tpid: 7 ip: 10.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes
include: (1) the process was killed by the OOM killer due to high memory usage"""
LOST = """The actor died unexpectedly before finishing this task.
\tpid: 7
\tip: 10.0.0.1
The actor died because its node has died. Node Id: 2c"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (KILLED, "Worker unexpectedly exits with a connection error code 2. End of file"),
        (LOST, "The actor died because its node has died. Node Id: 2c"),
        ("something new", "something new"),
    ],
    ids=["killed", "lost", "unknown"],
)
def test_death_cause_is_the_sentence_that_matters(text, cause):
    assert death_cause(RayActorError(error_msg=text)) == cause


OUT_OF_MEMORY = """Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.1, ID: 2c) where the task (actor ID: 7) was running was 117GB / 124GB"""
ENDS = {
    "died": ActorDiedError(),
    "memory": OutOfMemoryError(OUT_OF_MEMORY),
    "unschedulable": ActorUnschedulableError("The node does not exist any more"),
    "environment": RuntimeEnvSetupError("no such package"),
    "group": ActorPlacementGroupRemoved(),
    "answer": ObjectLostError("ab", None, ""),
}
"""Errors with which Ray tells the end of a process; only the first is a RayActorError."""
BROKEN = {
    "raised": RayTaskError("answer", "a traceback", ValueError("x")),
    "late": GetTimeoutError(),
}


def called(error, monkeypatch):
    """Calls ``hold`` and ``location`` to a worker's process, which end with ``error``, and its slot."""

    def get(ref, timeout):
        raise error

    fake = SimpleNamespace(get=get, wait=lambda refs, **_: (refs, []))
    monkeypatch.setattr(actor_calls, "ray", fake)
    method = SimpleNamespace(remote=lambda *_: object())
    actor = SimpleNamespace(hold=method, location=method, abort=method)
    slot = WorkerSlot(index=3, group=None, actor=actor, location="anywhere")
    calls = ActorCalls()
    for name in ("hold", "location"):
        calls.submit(slot, name, on_result=nothing)
    return calls, slot


@pytest.mark.parametrize("error", ENDS.values(), ids=ENDS)
def test_every_error_by_which_ray_ends_a_process_is_its_death_once(error, monkeypatch):
    calls, slot = called(error, monkeypatch)
    refs = calls.refs(with_holds=True)
    deaths = [death for ref in refs for death in calls.handle_result(ref, lambda *told: [told])]
    assert deaths == [(slot, error)] and not calls.refs(with_holds=True)
    assert str(error).split()[-1].rstrip(".") in death_cause(error)


@pytest.mark.parametrize("error", BROKEN.values(), ids=BROKEN)
def test_call_that_fails_in_a_live_process_is_no_death(error, monkeypatch):
    calls, _ = called(error, monkeypatch)
    first, second = calls.refs(with_holds=True)
    (report,) = calls.handle_result(first, lambda *_: pytest.fail("a death"))
    assert isinstance(report, WorkerFailed) and calls.refs(with_holds=True) == [second]


@pytest.mark.parametrize("error", [*ENDS.values(), *BROKEN.values()], ids=[*ENDS, *BROKEN])
def test_abort_of_a_process_that_is_gone_keeps_no_state(error, monkeypatch):
    _, slot = called(error, monkeypatch)
    assert abort([slot], 1) == {}
