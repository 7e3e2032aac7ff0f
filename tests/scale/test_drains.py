"""Nodes that drain, by the hundred: the run ends with as many slots as it began with."""

from collections import Counter

from raymega.orchestrate.core.worker_group_api import Heartbeat
from tests.scale.fake_ray import FakeCluster, fake_ray
from tests.scale.test_start import group_of, plan_of, poll_until_started, reserve, spec_of

NUM_DRAINS = 100


class Drains:
    """As DrainingNodes: the nodes that leave now."""

    def __init__(self):
        self.nodes = {}

    def poll(self):
        return self.nodes

    def is_leaving(self, node_id):
        return node_id in self.nodes


def test_nothing_stays_reserved_after_a_hundred_drains(tmp_path, monkeypatch):
    """Each drain moves eight ranks to a substitute, and the left node dies."""
    cluster, plan = FakeCluster(), plan_of(64)
    fake_ray(monkeypatch, cluster)
    group = group_of(plan, tmp_path)
    reserve(group, plan)
    slots = group._slots
    slots._draining_nodes = drains = Drains()
    group.start(spec_of(plan))
    poll_until_started(group, cluster, 64)
    for number in range(NUM_DRAINS):
        node = group.members()[8 * (number % 8)].node_id
        drains.nodes[node] = 50.0
        assert group.drain().ranks
        assert len(cluster.groups) == 9
        # the substitute's processes come, and all ranks stop and start again
        group._fill(slots.slots)
        while cluster.ready:
            group.poll(0.0)
        assert group.drain().is_ready
        cluster.counts["start"] = 0
        group.release(keep_warm=True)
        assert group.reserve(0.0) is None
        group.start(spec_of(plan))
        poll_until_started(group, cluster, 64)
        assert node not in {location.node_id for location in group.members().values()}
        # steps again: the drained node is given back
        group._is_stepping, group._renewed_s = True, 0.0
        assert {type(report) for report in group.poll(0.0)} <= {Heartbeat}
        assert len(cluster.groups) == 8 and len(slots.slots) == 64
        assert not any(slot.is_spare for slot in slots.slots)
    indices = Counter(slot.index for slot in slots.slots)
    assert max(indices.values()) == 1 and len(group.members()) == 64
