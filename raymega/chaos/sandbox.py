"""A Ray cluster of several nodes on this machine, whose nodes can be killed, frozen, drained and cut off.

Nodes are raylets of their own with the processes that they start; all have this machine's address, or each
its own where there is a network.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ray.cluster_utils import Cluster

from raymega.chaos.network import Network, Socket
from raymega.chaos.processes import children_of, parent_of
from raymega.orchestrate.cluster.node_agent import drain_node
from raymega.orchestrate.cluster.preemption_notices import Notice
from raymega.session import set_environment

SETTINGS = {  # a dead node is known within 1.5 s and a frozen one within 4.5 s, instead of 14 and 64
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 400,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "worker_niceness": 0,  # instead of 15: the machine is everybody's, and all that runs here has clocks
}


class Sandbox:
    """The cluster; from one thread. A node that is added takes a second or two."""

    def __init__(
        self, *, num_nodes: int, cpus_per_node: float, network: Network | None = None
    ) -> None:
        """Start a head without slots, and ``num_nodes`` nodes, each plugged into ``network`` if there is one."""
        set_environment(is_private=True)
        head = {"num_cpus": 0, "_system_config": SETTINGS, "include_dashboard": False}
        if network is not None:
            head["node_ip_address"] = network.gateway
        self._network = network
        self._sockets: dict[str, Socket] = {}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._cpus = cpus_per_node
        self._nodes: list[Any] = []  # Ray's own type has no stubs
        self._gone: list[Any] = []
        self.fill(num_nodes)

    @property
    def address(self) -> str:
        """``host:port`` for drivers."""
        return str(self._cluster.address)

    def fill(self, num_nodes: int) -> None:
        """Clear away what was lost, and have exactly so many nodes that are well."""
        self.clear()
        while len(self._nodes) < num_nodes:
            self._nodes.append(self._add())
        while len(self._nodes) > num_nodes:
            self._remove(self._nodes.pop(), allow_graceful=True)

    def clear(self) -> None:
        """Make an end of the nodes that were lost, frozen ones too."""
        while self._gone:
            node = self._gone.pop()
            self._signal(node, signal.SIGKILL)
            self._remove(node, allow_graceful=False)

    def node_of(self, pid: int) -> str:
        """Id of the node whose process this is; '' for none that is well."""
        raylet = parent_of(pid)
        return next((node.node_id for node in self._nodes if raylet_of(node) == raylet), "")

    def kill(self, node_id: str) -> None:
        """A machine crashes: everything on it ends at once. One that is gone stays so."""
        for node in self._lose(node_id):
            self._signal(node, signal.SIGKILL)

    def freeze(self, node_id: str) -> None:
        """A machine stands still: connections stay open, and nothing answers."""
        for node in self._lose(node_id):
            self._signal(node, signal.SIGSTOP)

    def cut_off(self, node_id: str) -> None:
        """A machine's cable is pulled: it works on, and nobody hears of it."""
        assert self._network, "it was made with a network"
        for node in self._lose(node_id):
            self._network.pull(self._sockets[node.node_id])

    def drain(self, node_id: str, *, seconds: float) -> None:
        """Ray is told that the node goes in ``seconds``; nothing happens to it by that."""
        drain_node(self.address, node_id, Notice(seconds=seconds, reason="chaos"))

    def leftovers(self) -> list[str]:
        """Living actors and placement groups, by name or id."""
        state = self._cluster.global_state
        actors = state.actor_table(None).values()
        groups = state.placement_group_table().values()
        return [
            *(f"actor {a['Name'] or a['ActorID']}" for a in actors if a["State"] != "DEAD"),
            *(f"slots {g['placement_group_id']}" for g in groups if g["state"] != "REMOVED"),
        ]

    def close(self) -> None:
        """Leave no process."""
        self.clear()
        self._cluster.shutdown()

    def _add(self) -> Any:
        if self._network is None:
            return self._cluster.add_node(num_cpus=self._cpus)
        socket = self._network.plug_in()
        with socket.inside():
            node = self._cluster.add_node(num_cpus=self._cpus, node_ip_address=socket.address)
        self._sockets[node.node_id] = socket
        return node

    def _remove(self, node: Any, *, allow_graceful: bool) -> None:
        self._cluster.remove_node(node, allow_graceful=allow_graceful)
        if self._network is not None:
            self._network.unplug(self._sockets.pop(node.node_id))

    def _lose(self, node_id: str) -> list[Any]:
        """Those of the nodes that are well with this id count as gone."""
        lost = [node for node in self._nodes if node.node_id == node_id]
        self._nodes = [node for node in self._nodes if node not in lost]
        self._gone += lost
        return lost

    def _signal(self, node: Any, number: int) -> None:
        """To the raylet first, which would else start others."""
        raylet = raylet_of(node)
        for pid in (raylet, *children_of(raylet)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def sandbox(
    *, num_nodes: int, cpus_per_node: float, has_network: bool = False
) -> Iterator[Sandbox]:
    """A sandbox for the body; with ``has_network`` its nodes have cables, see network.missing."""
    network = Network() if has_network else None
    try:
        box = Sandbox(num_nodes=num_nodes, cpus_per_node=cpus_per_node, network=network)
        try:
            yield box
        finally:
            box.close()
    finally:
        if network is not None:
            network.close()


def raylet_of(node: Any) -> int:
    """Its pid; 0 when Ray knows of none any more."""
    processes = node.all_processes.get("raylet", ())
    return int(processes[0].process.pid) if processes else 0
