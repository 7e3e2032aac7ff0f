"""What the cluster offers: living nodes as worker slots, and which of them will be taken away.

It reserves nothing. Who tells Ray of a drain is node_agent's; what a run does about it is the controller's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

import ray

from raymega.config.schema import ClusterSection
from raymega.messages import NodeSlots
from raymega.ray_private import declared_resources, drain_deadlines_ms, free_resources

log = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]

_ROUNDING = 1e-6
LOOK_EVERY_S = 1.0


def list_nodes(cluster: ClusterSection) -> list[NodeSlots]:
    """Every living node with the number of workers that it could hold, were it idle."""
    nodes = _living_nodes()
    return _with_slots(cluster, nodes, {node["NodeID"]: node["Resources"] for node in nodes})


def list_free_nodes(cluster: ClusterSection) -> list[NodeSlots]:
    """The same, with the number of workers for which it has room beside what runs on it."""
    return _with_slots(cluster, _living_nodes(), free_resources())


def node_memory() -> dict[str, int]:
    """Bytes of host memory that Ray counts on each living node, by id; where it does."""
    nodes = _living_nodes()
    return {n["NodeID"]: int(n["Resources"]["memory"]) for n in nodes if "memory" in n["Resources"]}


def find_device(cluster: ClusterSection) -> Device:
    """The job's device, with ``auto`` resolved: cuda when a node has GPUs, or one may join that has."""
    return _device(cluster, _living_nodes())


def worker_resources(device: Device, cpus_per_worker: float) -> dict[str, float]:
    """What one worker reserves."""
    return {"CPU": cpus_per_worker} | ({"GPU": 1.0} if device == "cuda" else {})


class DrainingNodes:
    """Nodes that will be taken away, as far as Ray was told; it is asked once a second, from one thread."""

    def __init__(self) -> None:
        self._probed_s = -LOOK_EVERY_S
        self._seconds: dict[str, float] = {}

    def poll(self) -> dict[str, float]:
        """Seconds that are left, by node id; infinite for a drain without a deadline."""
        now_s = time.monotonic()
        if now_s - self._probed_s >= LOOK_EVERY_S:
            self._probed_s, before = now_s, self._seconds
            self._seconds = _draining_nodes()
            for node in self._seconds.keys() - before.keys():
                log.warning("node %s leaves in %.0f s", node[:8], self._seconds[node])
        return self._seconds

    def is_leaving(self, node_id: str) -> bool:
        """As of the last look."""
        return node_id in self._seconds


def _living_nodes() -> list[dict[str, Any]]:  # Ray's own table, untyped there
    table = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in table if node["Alive"]]


def _with_slots(
    cluster: ClusterSection, nodes: list[dict[str, Any]], has: Mapping[str, Mapping[str, float]]
) -> list[NodeSlots]:
    """``nodes`` with the workers that fit into what each ``has``."""
    device = _device(cluster, nodes)
    return [
        NodeSlots(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            num_slots=_num_slots(has.get(node["NodeID"], {}), device, cluster.cpus_per_worker),
            labels=dict(node.get("Labels", {})),
        )
        for node in nodes
    ]


def _device(cluster: ClusterSection, nodes: list[dict[str, Any]]) -> Device:
    if cluster.device != "auto":
        return cluster.device
    has_gpus = any(node["Resources"].get("GPU", 0) >= 1 for node in nodes)
    return "cuda" if has_gpus or _are_gpus_declared() else "cpu"


def _are_gpus_declared() -> bool:
    """A node type with GPUs is known to Ray's state. Not every autoscaler tells it its types."""
    return declared_resources().get("GPU", 0) >= 1


def _num_slots(resources: Mapping[str, float], device: Device, cpus_per_worker: float) -> int:
    needs = worker_resources(device, cpus_per_worker)
    return min(int(resources.get(kind, 0) / amount + _ROUNDING) for kind, amount in needs.items())


def _draining_nodes() -> dict[str, float]:
    """Ray's table of drains, which is private: without it a node that leaves is a node that is lost."""
    try:
        deadlines_ms = drain_deadlines_ms()
    except (AttributeError, RuntimeError) as error:
        log.debug("no table of drains: %s", error)
        return {}
    now_ms = time.time_ns() / 1e6
    return {
        node: max(0.0, (at_ms - now_ms) / 1000) if at_ms else float("inf")
        for node, at_ms in deadlines_ms.items()
    }
