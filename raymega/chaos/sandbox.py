"""Sandbox: a Ray cluster of several nodes on this machine that can be killed, frozen, drained and cut off.

A node is a raylet with its child processes. All nodes share this machine's address, or have their own with a
Network.
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
    "worker_niceness": 0,  # instead of 15: a starved worker would look like a hang
}


class Sandbox:
    """Cluster, to be used from one thread. Adding a node takes one or two seconds."""

    def __init__(
        self, *, num_nodes: int, cpus_per_node: float, network: Network | None = None
    ) -> None:
        """Start a head without CPUs, and ``num_nodes`` nodes, each in a namespace of ``network`` if there is one."""
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
        """Return the cluster's address for drivers, ``host:port``."""
        return str(self._cluster.address)

    def fill(self, num_nodes: int) -> None:
        """Remove lost nodes, and add or remove nodes until exactly ``num_nodes`` are healthy."""
        self.clear()
        while len(self._nodes) < num_nodes:
            self._nodes.append(self._add())
        while len(self._nodes) > num_nodes:
            self._remove(self._nodes.pop(), allow_graceful=True)

    def clear(self) -> None:
        """Kill and remove the lost nodes, frozen ones included."""
        while self._gone:
            node = self._gone.pop()
            self._signal(node, signal.SIGKILL)
            self._remove(node, allow_graceful=False)

    def node_of(self, pid: int) -> str:
        """Return the id of the healthy node that runs the process; '' if there is none."""
        raylet = parent_of(pid)
        return next((node.node_id for node in self._nodes if raylet_of(node) == raylet), "")

    def kill(self, node_id: str) -> None:
        """Kill a node and all its processes at once, as in a crash; a lost node stays lost."""
        for node in self._lose(node_id):
            self._signal(node, signal.SIGKILL)

    def freeze(self, node_id: str) -> None:
        """Stop a node and all its processes: connections stay open, and nothing answers."""
        for node in self._lose(node_id):
            self._signal(node, signal.SIGSTOP)

    def cut_off(self, node_id: str) -> None:
        """Cut the link of a node, whose processes keep running."""
        assert self._network, "it was made with a network"
        for node in self._lose(node_id):
            self._network.pull(self._sockets[node.node_id])

    def drain(self, node_id: str, *, seconds: float) -> None:
        """Give Ray a preemption notice for the node, with a deadline in ``seconds``; the node itself runs on."""
        drain_node(self.address, node_id, Notice(seconds=seconds, reason="chaos"))

    def leftovers(self) -> list[str]:
        """Return the names or ids of living actors and placement groups."""
        state = self._cluster.global_state
        actors = state.actor_table(None).values()
        groups = state.placement_group_table().values()
        return [
            *(f"actor {a['Name'] or a['ActorID']}" for a in actors if a["State"] != "DEAD"),
            *(f"slots {g['placement_group_id']}" for g in groups if g["state"] != "REMOVED"),
        ]

    def close(self) -> None:
        """Stop the cluster with all its processes."""
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
        """Mark the healthy node of this id as lost, and return it; an empty list if there is none."""
        lost = [node for node in self._nodes if node.node_id == node_id]
        self._nodes = [node for node in self._nodes if node not in lost]
        self._gone += lost
        return lost

    def _signal(self, node: Any, number: int) -> None:
        """Send a signal to a node's processes, to the raylet first, which would otherwise restart workers."""
        raylet = raylet_of(node)
        for pid in (raylet, *children_of(raylet)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def sandbox(
    *, num_nodes: int, cpus_per_node: float, has_network: bool = False
) -> Iterator[Sandbox]:
    """Yield a sandbox; with ``has_network`` its nodes have links that can be cut, see ``network.missing``."""
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
    """Return the pid of a node's raylet; 0 when Ray no longer knows it."""
    processes = node.all_processes.get("raylet", ())
    return int(processes[0].process.pid) if processes else 0
