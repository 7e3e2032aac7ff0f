"""Lists the cluster's live nodes with their worker slots, and the nodes that are draining.

It reserves nothing. ``cluster/node_agent.py`` tells Ray of a drain; the controller decides what a run does
about it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

import ray

from raymega.config.schema import ClusterSection
from raymega.messages import NodeSlots
from raymega.orchestrate.core.rank_placement import ROUNDING
from raymega.ray_private import declared_resources, drain_deadlines_ms, free_resources

log = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]

LOOK_EVERY_S = 1.0


def list_nodes(cluster: ClusterSection) -> list[NodeSlots]:
    """Return every live node with the number of workers that it could hold if it were idle."""
    nodes = _living_nodes()
    return _with_slots(cluster, nodes, {node["NodeID"]: node["Resources"] for node in nodes})


def list_free_nodes(cluster: ClusterSection) -> list[NodeSlots]:
    """Return every live node with the number of workers that its free resources can hold now."""
    return _with_slots(cluster, _living_nodes(), free_resources())


def node_memory() -> dict[str, int]:
    """Return Ray's ``memory`` resource in bytes by node id, of the live nodes that have one."""
    nodes = _living_nodes()
    return {n["NodeID"]: int(n["Resources"]["memory"]) for n in nodes if "memory" in n["Resources"]}


def find_device(cluster: ClusterSection) -> Device:
    """Return the job's device; ``auto`` is cuda if a node has GPUs, or one with GPUs may join."""
    return _device(cluster, _living_nodes())


def worker_resources(device: Device, cpus_per_worker: float) -> dict[str, float]:
    """Return the Ray resources that one worker reserves."""
    return {"CPU": cpus_per_worker} | ({"GPU": 1.0} if device == "cuda" else {})


class DrainingNodes:
    """Nodes that drain according to Ray, which is asked once a second; used from one thread."""

    def __init__(self) -> None:
        self._probed_s = -LOOK_EVERY_S
        self._seconds: dict[str, float] = {}  # by node id, as of the last look

    def poll(self) -> dict[str, float]:
        """Return the seconds left by node id; infinite for a drain without a deadline."""
        now_s = time.monotonic()
        # each node that drains since the last look is logged once
        if now_s - self._probed_s >= LOOK_EVERY_S:
            self._probed_s, before = now_s, self._seconds
            self._seconds = _draining_nodes()
            for node in self._seconds.keys() - before.keys():
                log.warning("node %s leaves in %.0f s", node[:8], self._seconds[node])
        return self._seconds

    def is_leaving(self, node_id: str) -> bool:
        """Return whether the node was draining at the last ``poll``."""
        return node_id in self._seconds


def _living_nodes() -> list[dict[str, Any]]:  # Ray's own table, untyped there
    table = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in table if node["Alive"]]


def _with_slots(
    cluster: ClusterSection, nodes: list[dict[str, Any]], has: Mapping[str, Mapping[str, float]]
) -> list[NodeSlots]:
    """Return ``nodes`` with the number of workers that fit into the resources ``has`` of each node id."""
    device = _device(cluster, nodes)
    return [
        NodeSlots(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            num_slots=_num_slots(has.get(node["NodeID"], {}), device, cluster.cpus_per_worker),
            cpus=has.get(node["NodeID"], {}).get("CPU", 0.0),
            gpus=has.get(node["NodeID"], {}).get("GPU", 0.0),
            needs_gpu=device == "cuda",
            labels=dict(node.get("Labels", {})),
        )
        for node in nodes
    ]


def _device(cluster: ClusterSection, nodes: list[dict[str, Any]]) -> Device:
    if cluster.device != "auto":
        return cluster.device
    has_gpus = any(node["Resources"].get("GPU", 0) >= 1 for node in nodes)
    return "cuda" if has_gpus or declared_resources().get("GPU", 0) >= 1 else "cpu"


def _num_slots(resources: Mapping[str, float], device: Device, cpus_per_worker: float) -> int:
    needs = worker_resources(device, cpus_per_worker)
    # the scarcest resource decides; ROUNDING absorbs float error in quotients such as 0.3 / 0.1
    return min(int(resources.get(kind, 0) / amount + ROUNDING) for kind, amount in needs.items())


def _draining_nodes() -> dict[str, float]:
    """Return the seconds left by draining node; empty where Ray lacks this private table.

    Without the table, a node that is taken away is noticed only when it is lost.
    """
    try:
        deadlines_ms = drain_deadlines_ms()
    except (AttributeError, RuntimeError) as error:
        log.debug("no table of drains: %s", error)
        return {}
    # a deadline of 0 means that there is none
    now_ms = time.time_ns() / 1e6
    return {
        node: max(0.0, (at_ms - now_ms) / 1000) if at_ms else float("inf")
        for node, at_ms in deadlines_ms.items()
    }
