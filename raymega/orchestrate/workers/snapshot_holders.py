"""The snapshot servers of a run: on each node that hosts workers, a small actor that holds snapshots in memory.

The driver owns the actors, so they outlive attempts and end with the run or the driver.
``checkpoint/snapshots/`` defines what they hold, ``plan/snapshot_replicas.py`` which of them a rank uses.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymega.checkpoint.snapshots.snapshot import Snapshot, find_snapshot
from raymega.messages import Replicas
from raymega.orchestrate.core.clock import Clock
from raymega.plan.run_plan import RunPlan
from raymega.plan.snapshot_replicas import copy_nodes

log = logging.getLogger(__name__)

START_PATIENCE_S = 30.0
"""Longest wait of an attempt for snapshot servers in seconds; then it starts without the missing ones."""
FIND_TIMEOUT_S = 5.0
"""Timeout of one call to a snapshot server when the driver looks for a snapshot, in seconds."""


class SnapshotServerActor:
    """The actor of a snapshot server, which serves a MemoryStoreServer."""

    def __init__(self, token: str) -> None:
        # imported here, because the driver does not need Arrow Flight
        from raymega.checkpoint.snapshots.queries import QUESTIONS
        from raymega.storage.memory_server import MemoryStoreServer, give_memory_back

        give_memory_back()
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._server = MemoryStoreServer(host, token, questions=QUESTIONS)

    def address(self) -> str:
        """Return the snapshot server's ``host:port``."""
        return self._server.uri

    def hold(self) -> None:
        """Block forever; the call fails when this process ends, and so reports its end to the driver."""
        Event().wait()


@dataclass(kw_only=True, slots=True)
class _Kept:
    """A snapshot server's actor, its pending ``hold`` and ``address`` calls, and its address once known."""

    actor: ActorHandle[Any]  # an actor class made at run time has no static type
    end: ray.ObjectRef[Any]
    answer: ray.ObjectRef[str]
    address: str = ""


class SnapshotServers:
    """The SnapshotManager on Ray, with the methods by which the worker group runs snapshot servers."""

    def __init__(self, plan: RunPlan, *, clock: Clock) -> None:
        """Prepare without snapshot servers; ``plan`` is that of the job's own grid."""
        self._plan, self._clock = plan, clock
        self._token = secrets.token_hex(32)
        # snapshot servers by node; nodes of the present attempt, and when they were set
        self._by_node: dict[str, _Kept] = {}
        self._wanted: set[str] = set()
        self._since_s = 0.0

    def location(self, nodes: Collection[str]) -> None:
        """Start a snapshot server on each of ``nodes`` that has none; the others stay. Never blocks."""
        self._drop_dead()
        self._wanted, self._since_s = set(nodes), self._clock.monotonic()
        for node in sorted(self._wanted - self._by_node.keys()):
            self._by_node[node] = self._spawn(node)

    def add(self, node: str) -> None:
        """Start a snapshot server on one more node, if it has none. Never blocks."""
        if node not in self._wanted:
            self.location(self._wanted | {node})

    def pending(self) -> list[ray.ObjectRef[str]]:
        """Return the pending ``address`` calls of wanted snapshot servers; [] once START_PATIENCE_S have passed."""
        if self._clock.monotonic() - self._since_s > START_PATIENCE_S:
            return []
        wanted = (kept for node, kept in self._by_node.items() if node in self._wanted)
        return [kept.answer for kept in wanted if not kept.address]

    def collect(self) -> None:
        """Store the addresses that have arrived, and drop snapshot servers that failed to start. Never blocks."""
        answered = _finished(
            {n: kept.answer for n, kept in self._by_node.items() if not kept.address}
        )
        for node in answered:
            try:
                self._by_node[node].address = ray.get(
                    self._by_node[node].answer, timeout=FIND_TIMEOUT_S
                )
            except RayError as error:
                log.warning(
                    "no snapshots on node %s: its snapshot server did not start: %s", node, error
                )
                del self._by_node[node]

    def replicas(self, nodes: Sequence[str]) -> list[Replicas]:
        """Return for each rank the snapshot servers that it writes to; ``nodes`` are the ranks' node ids."""
        found: list[Replicas] = []
        # one rank a node deletes old snapshots there
        tidied: set[str] = set()
        for node, homes in zip(nodes, copy_nodes(nodes), strict=True):
            # own node first, then its partner
            home = self._addresses(homes[:1])
            replicas = Replicas(
                token=self._token,
                write_to=self._addresses(homes),
                num_copies=len(homes),
                home="".join(home),
                tidies=() if node in tidied else home,
            )
            tidied.add(node)
            found.append(replicas)
        return found

    def find(self, *, skip: Collection[str]) -> Snapshot | None:
        """See SnapshotManager."""
        self._drop_dead()
        if not self._by_node:
            return None
        from raymega.storage.remote_memory_store import RemoteMemoryStore  # imports Arrow Flight

        stores = {
            kept.address: RemoteMemoryStore(kept.address, self._token, timeout_s=FIND_TIMEOUT_S)
            for kept in self._by_node.values()
            if kept.address
        }
        job = self._plan.job.model_dump(mode="json")
        return find_snapshot(stores, job=job, now=self._clock.timestamp(), skip=skip)

    def settle(self) -> None:
        """See SnapshotManager."""
        self._kill(self._by_node.keys() - self._wanted)

    def close(self) -> None:
        """Kill all snapshot servers, and with them all snapshots."""
        self._kill(tuple(self._by_node))

    def _spawn(self, node: str) -> _Kept:
        # threads: one for ``hold``, one for short calls; Flight serves in threads of its own
        options = {
            "name": f"{self._plan.job.run.name}/snapshots-{node[:8]}-{secrets.token_hex(3)}",
            "num_cpus": 0,
            "max_concurrency": 2,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        }
        actor = ray.remote(SnapshotServerActor).options(**options).remote(self._token)
        handle = cast(ActorHandle[Any], actor)
        return _Kept(actor=handle, end=handle.hold.remote(), answer=handle.address.remote())

    def _addresses(self, nodes: Iterable[str]) -> tuple[str, ...]:
        kept = (self._by_node.get(node) for node in nodes)
        return tuple(server.address for server in kept if server and server.address)

    def _drop_dead(self) -> None:
        for node in _finished({node: kept.end for node, kept in self._by_node.items()}):
            log.warning("the snapshot server of node %s is gone", node)
            del self._by_node[node]

    def _kill(self, nodes: Collection[str]) -> None:
        for node in tuple(nodes):
            ray.kill(self._by_node.pop(node).actor)


def _finished(refs: Mapping[str, ray.ObjectRef[Any]]) -> list[str]:
    """Return the keys of the calls that have ended, in one question for all of them."""
    if not refs:
        return []
    ended = set(ray.wait([*refs.values()], num_returns=len(refs), timeout=0)[0])
    return [key for key, ref in refs.items() if ref in ended]
