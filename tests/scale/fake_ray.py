"""Ray as a list of calls: actors answer at once, and every call, byte and look is counted.

Nothing starts, nothing waits. `fake_ray` puts it in the place of Ray in the modules of the worker group.
"""

import pickle
from collections import Counter
from itertools import islice
from types import SimpleNamespace

from raymega.messages import Progress
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.workers import (
    actor_calls,
    attempt_start,
    node_monitor,
    placement_slots,
    ray_worker_group,
    snapshot_holders,
)
from raymega.orchestrate.workers.node_monitor import MonitorSlot, NodeReport

GPUS_A_NODE = 8
MODULES = (
    actor_calls,
    attempt_start,
    node_monitor,
    placement_slots,
    ray_worker_group,
    snapshot_holders,
)


class Ref:
    """Answer of a call, which ``cluster.ready`` holds once it is there."""

    __slots__ = ("answer",)

    def __init__(self, answer):
        self.answer = answer

    def __reduce__(self):
        return Ref, (None,)


class FakeActor:
    """Actor whose methods return refs; ``answers`` are functions by method, others return None."""

    def __init__(self, cluster, answers):
        self.cluster, self.answers, self.is_dead = cluster, answers, False

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *args: self.cluster.call(self, method, args))


class FakeGroup:
    """Placement group on one node."""

    def __init__(self, cluster, index, node):
        self.id = SimpleNamespace(hex=lambda: f"group{index}")
        self.cluster, self.node, self.state = cluster, node, "CREATED"

    @property
    def bundle_specs(self):
        return [{"GPU": GPUS_A_NODE}]


class FakeCluster:
    """Nodes of eight ranks; what the driver asks of them is in ``counts``, ``num_bytes`` and ``waited``.

    Attributes:
        counts: Calls by method, and looks at placement groups.
        num_bytes: Bytes of the arguments of ``start``.
        batch: Answers that one wait finds.
        held_back: Methods whose answers are held back.
    """

    def __init__(self, *, batch=64):
        self.counts, self.num_bytes, self.batch = Counter(), 0, batch
        self.num_groups, self.groups, self.held_back = 0, {}, {"hold", "next_reports"}
        self.ready, self.held = {}, []  # answers that are there, in order, and those held back
        self.waited = 0

    # What actors do.

    def call(self, actor, method, args):
        self.counts[method] += 1
        if method == "start":
            self.num_bytes += len(pickle.dumps(args))
        answer = actor.answers.get(method)
        ref = Ref(answer(*args) if answer else None)
        if method in self.held_back:
            self.held.append(ref)
        else:
            self.ready[ref] = method
        return ref

    # What Ray's module does.

    def wait(self, refs, num_returns=1, timeout=None):
        self.counts["wait"] += 1
        self.waited += len(refs)
        asked = set(refs)
        here = [*islice((ref for ref in self.ready if ref in asked), min(num_returns, self.batch))]
        taken = set(here)
        return here, [ref for ref in refs if ref not in taken]

    def get(self, ref, timeout=None):
        self.ready.pop(ref, None)
        if isinstance(ref.answer, Exception):
            raise ref.answer
        return ref.answer

    def kill(self, actor):
        actor.is_dead = True
        self.counts["kill"] += 1

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "head", runtime_env={})

    def put(self, value):
        self.num_bytes += len(pickle.dumps(value))
        return Ref(value)

    # What the placement groups' module does.

    def placement_group(self, bundles, strategy, _soft_target_node_id=None):
        self.counts["placement_group"] += 1
        index, self.num_groups = self.num_groups, self.num_groups + 1
        group = FakeGroup(self, index, f"node{index:05}")
        self.groups[group.id.hex()] = group
        return group

    def placement_group_table(self, group=None):
        self.counts["table"] += 1
        if group is not None:
            return self._row(group)
        return {name: self._row(each) for name, each in self.groups.items()}

    def remove_placement_group(self, group):
        del self.groups[group.id.hex()]

    def _row(self, group):
        return {"state": group.state, "bundles_to_node_id": {0: group.node}}


def worker(cluster, rank, node):
    """A worker's actor on ``node``."""
    location = WorkerLocation(
        node_id=node, address="10.0.0.1", pid=1000 + rank, gpus=(str(rank % GPUS_A_NODE),)
    )
    answers = {
        "location": lambda: location,
        "host_rendezvous": lambda host: f"{host}:1",
        "next_reports": lambda _: [Progress(rank=rank, step=1)],
        "abort": lambda *_: -1,
    }
    return FakeActor(cluster, answers)


def fake_ray(monkeypatch, cluster):
    """Put ``cluster`` in the place of Ray in the modules of the worker group."""
    for module in MODULES:
        for name in ("ray", "placement_group", "placement_group_table", "remove_placement_group"):
            if hasattr(module, name):
                monkeypatch.setattr(
                    module, name, cluster if name == "ray" else getattr(cluster, name)
                )
    for module in (placement_slots, ray_worker_group):
        monkeypatch.setattr(module, "list_nodes", lambda _: [])
    monkeypatch.setattr(placement_slots, "find_device", lambda _: "cuda")
    monkeypatch.setattr(ray_worker_group, "list_free_nodes", lambda _: [])

    def spawn(slots, slot, *, name, entry, **_):
        slot.actor = worker(cluster, slot.index, slot.group.node)

    monkeypatch.setattr(placement_slots.WorkerSlots, "spawn", spawn)

    def spawn_monitor(monitors, node, slot):
        heard = {}
        answers = {
            "watch": heard.update,
            "next_reports": lambda _: NodeReport(
                heard=tuple(heard),
                reports=tuple(Progress(rank=r, step=1) for r in heard),
                deaths={},
            ),
        }
        actor = FakeActor(cluster, answers)
        monitors._by_node[node] = MonitorSlot(index=-1, group=slot.group, actor=actor, node_id=node)
        return monitors._by_node[node]

    monkeypatch.setattr(node_monitor.NodeMonitors, "_spawn", spawn_monitor)
