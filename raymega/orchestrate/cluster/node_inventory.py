"""What the cluster offers: living nodes as worker slots. It reserves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import ray

from raymega.config.schema import ClusterSection
from raymega.messages import NodeSlots
from raymega.ray_private import declared_resources, free_resources

Device = Literal["cpu", "cuda"]

_ROUNDING = 1e-6


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
