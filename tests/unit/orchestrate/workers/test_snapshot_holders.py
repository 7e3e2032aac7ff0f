"""Snapshot servers that do not start, without Ray: the run goes without their snapshots."""

from types import SimpleNamespace

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    OutOfMemoryError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from raymega.orchestrate.core.clock import SystemClock
from raymega.orchestrate.workers import snapshot_holders
from raymega.orchestrate.workers.snapshot_holders import SnapshotServers, _Kept

ENDS = (
    ActorDiedError(),
    ActorUnschedulableError("The node does not exist any more"),
    OutOfMemoryError("the node is low on memory"),
    RuntimeEnvSetupError("no such package"),
    RayTaskError("address", "a traceback", OSError("no port")),
)


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_node_whose_server_does_not_start_has_no_snapshots(error, monkeypatch):
    """Of two nodes the other one's server is used; the attempt waits for neither."""

    def get(ref, timeout):
        if isinstance(ref, Exception):
            raise ref
        return ref

    # all address calls have ended, and no server has
    fake = SimpleNamespace(
        get=get, wait=lambda refs, **_: ([ref for ref in refs if ref != "lives"], [])
    )
    monkeypatch.setattr(snapshot_holders, "ray", fake)
    servers = SnapshotServers(None, clock=SystemClock())
    answers = {"lost": error, "here": "10.0.0.1:5"}
    monkeypatch.setattr(
        servers, "_spawn", lambda node: _Kept(actor=None, end="lives", answer=answers[node])
    )
    servers.location(answers)
    servers.collect()
    assert servers.pending() == []
    assert [each.write_to for each in servers.replicas(["here"])] == [("10.0.0.1:5",)]
    assert [each.write_to for each in servers.replicas(["lost"])] == [()]
