import pytest
import ray
from ray._private.state import state

from raymega.config.schema import ClusterSection
from raymega.orchestrate.cluster.node_inventory import (
    find_device,
    list_free_nodes,
    list_nodes,
    node_memory,
    worker_resources,
)

HEAD = {"NodeID": "h", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 2.0}}
GPUS = HEAD | {"NodeID": "g", "Labels": {"zone": "a"}, "Resources": {"CPU": 12.0, "GPU": 8.0}}
DEAD = GPUS | {"NodeID": "d", "Alive": False}


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [HEAD, GPUS, DEAD])
    declare(monkeypatch, None)


def declare(monkeypatch, resources):
    monkeypatch.setattr(state, "get_max_resources_from_cluster_config", lambda: resources)


@pytest.mark.parametrize(
    ("device", "cpus", "slots"),
    [
        ("cpu", 1.0, {"h": 2, "g": 12}),
        ("cpu", 0.1, {"h": 20, "g": 120}),
        ("cuda", 1.0, {"h": 0, "g": 8}),
        ("cuda", 2.0, {"h": 0, "g": 6}),
        ("auto", 1.0, {"h": 0, "g": 8}),
    ],
)
def test_list_nodes_counts_slots_of_living_nodes(device, cpus, slots):
    nodes = list_nodes(ClusterSection(device=device, cpus_per_worker=cpus))
    assert {node.node_id: node.num_slots for node in nodes} == slots
    assert nodes[1].labels == {"zone": "a"}


def test_free_nodes_are_counted_by_what_is_left_on_them(monkeypatch):
    left = {"h": {"CPU": 0.5}, "g": {"CPU": 12.0, "GPU": 3.0}}
    monkeypatch.setattr(state, "available_resources_per_node", lambda: left)
    nodes = list_free_nodes(ClusterSection(device="cuda"))
    assert {node.node_id: node.num_slots for node in nodes} == {"h": 0, "g": 3}


def test_find_device_is_cpu_when_no_living_node_has_gpus(monkeypatch):
    assert find_device(ClusterSection()) == "cuda"
    monkeypatch.setattr(ray, "nodes", lambda: [HEAD, DEAD])
    assert find_device(ClusterSection()) == "cpu"
    declare(monkeypatch, {"CPU": 64, "GPU": 0})
    assert find_device(ClusterSection()) == "cpu"


def test_find_device_is_cuda_when_gpu_nodes_may_join(monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [HEAD])
    declare(monkeypatch, {"CPU": 64, "GPU": 16})
    assert find_device(ClusterSection()) == "cuda"
    assert find_device(ClusterSection(device="cpu")) == "cpu"


def test_worker_resources_have_a_gpu_only_on_cuda():
    assert worker_resources("cpu", 0.5) == {"CPU": 0.5}
    assert worker_resources("cuda", 1.0) == {"CPU": 1.0, "GPU": 1.0}


def test_memory_of_living_nodes_is_what_ray_counts(monkeypatch):
    table = [
        {"NodeID": "a", "Alive": True, "Resources": {"memory": 5e9}},
        {"NodeID": "b", "Alive": True, "Resources": {"CPU": 1.0}},
        {"NodeID": "c", "Alive": False, "Resources": {"memory": 5e9}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: table)
    assert node_memory() == {"a": 5_000_000_000}
