"""A simulated cluster in the place of Ray: nodes that come, drain and die, placement groups, and actors.

Like Ray it takes the groups of a dead node up again elsewhere once there is room, ends a driver's actors and
groups with the driver, and places nothing on a node that drains. Every second process ends of its node's memory.
"""

from itertools import count
from types import SimpleNamespace

from ray.exceptions import OutOfMemoryError, RayActorError

from raymega.orchestrate.cluster import node_inventory
from raymega.orchestrate.core.rank_placement import WorkerLocation
from raymega.orchestrate.driver import checkpoint_committer, run_context
from raymega.orchestrate.run_store import journal
from raymega.orchestrate.workers import (
    actor_calls,
    attempt_start,
    node_monitor,
    placement_slots,
    ray_worker_group,
)
from raymega.orchestrate.workers.node_monitor import MonitorSlot, NodeReport
from tests.scale.fleet.timeline import Killed, VirtualEvent

BEAT_S = 10.0
"""Interval in which a rank without a report answers, in virtual seconds."""
TICK_S = 5.0
CPUS_A_GPU = 8


class Ref:
    """Answer of a call, which may come later."""

    __slots__ = ("answer", "is_ready")

    def __init__(self):
        self.answer, self.is_ready = None, False


class Node:
    """A machine with GPUs."""

    def __init__(self, name, gpus, domain=""):
        self.name, self.gpus, self.is_alive, self.leaves_s = name, gpus, True, None
        self.free = list(range(gpus))


class Group:
    """Placement group: one bundle, on one node."""

    def __init__(self, owner, bundle, near, name):
        self.owner, self.bundle, self.near, self.node = owner, bundle, near, None
        self.gpus, self.state = round(bundle["GPU"]), "PENDING"
        self.id, self.held = SimpleNamespace(hex=lambda: name), []

    @property
    def bundle_specs(self):
        return [self.bundle]


class Actor:
    """A process; calls to it end with it."""

    def __init__(self, cluster, owner):
        self.cluster, self.owner, self.is_dead, self.pending = cluster, owner, False, []
        self.ended_by = None  # error of its calls, once it is dead
        cluster.actors.append(self)

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *args: self.call(method, args))

    def call(self, method, args):
        ref = Ref()
        self.pending.append(ref)
        if self.is_dead:
            self.cluster.answer(self, ref, self.ended_by)
        else:
            getattr(self, f"on_{method}")(ref, *args)
        return ref

    def reply(self, ref, value=None, *, delay_s=0.0):
        if delay_s:
            self.cluster.timeline.after(delay_s, self.cluster.answer, self, ref, value)
        else:
            self.cluster.answer(self, ref, value)

    def die(self):
        if not self.is_dead:
            self.is_dead, self.ended_by = True, self.cluster.next_end()
            self.cluster.actors.remove(self)
            for ref in self.pending[:]:
                self.cluster.answer(self, ref, self.ended_by)


class Monitor(Actor):
    """The monitor of a node, whose answers are of its ranks."""

    def __init__(self, cluster, owner, node):
        super().__init__(cluster, owner)
        self.node, self.workers, self.ref = node, {}, None
        cluster.monitors.append(self)

    def on_watch(self, ref, workers):
        self.workers = dict(workers)
        self.reply(ref)

    def on_stop(self, ref):
        self.workers = {}
        self.reply(ref)

    def on_next_reports(self, ref, every_s):
        self.ref = ref
        self.look()
        self.cluster.timeline.after(max(every_s, BEAT_S), self.send, ref)

    def look(self):
        """Answer at once if a rank has died, or has more to tell than that it is there."""
        if any(each.is_dead or each.mailbox for each in self.workers.values()):
            self.send(self.ref)

    def send(self, ref):
        if ref is None or ref.is_ready or self.is_dead:
            return
        living = {rank: each for rank, each in self.workers.items() if not each.is_dead}
        deaths = dict.fromkeys(self.workers.keys() - living.keys(), "killed")
        reports = [report for each in living.values() for report in each.pop_reports()]
        self.workers = living
        self.reply(ref, NodeReport(heard=tuple(living), reports=tuple(reports), deaths=deaths))


class Cluster:
    """Nodes, groups and actors; the module ray and that of placement groups for the engine.

    Attributes:
        current: Driver at work, which owns what is made now.
    """

    def __init__(self, timeline, draw, *, make_worker):
        self.timeline, self.draw, self._make_worker = timeline, draw, make_worker
        self.nodes, self.groups, self.actors, self.monitors = {}, {}, [], []
        self.current, self._number, self._is_changed, self.num_calls = None, count(), False, 0
        self._num_ends = count()

    # Nodes.

    def add_node(self, gpus):
        node = Node(f"node{next(self._number):05}", gpus)
        self.nodes[node.name] = node
        self.schedule_later()
        return node

    def kill_node(self, name):
        node = self.nodes.pop(name, None)
        if node is None:
            return
        node.is_alive = False
        for group in self.groups.values():
            if group.node is node:
                group.node, group.held, group.state = None, [], "RESCHEDULING"
        for actor in self.actors[:]:
            if getattr(actor, "node", None) in (node, name):
                actor.die()
        self.schedule_later()

    def schedule_later(self):
        self.timeline.after(1.0, self._schedule)

    def _schedule(self):
        """Place the groups that wait, each near its node if there is room, else on the freest."""
        for group in self.groups.values():
            if group.node is not None:
                continue
            with_room = [
                node for node in self.nodes.values()
                if node.leaves_s is None and len(node.free) >= group.gpus
            ]  # fmt: skip
            if with_room:
                near = [node for node in with_room if node.name == group.near]
                node = (near or sorted(with_room, key=lambda each: -len(each.free)))[0]
                group.node, group.state = node, "CREATED"
                group.held = [node.free.pop(0) for _ in range(group.gpus)]
                for actor in self.actors:
                    if getattr(actor, "group", None) is group and actor.node is None:
                        actor.be_placed(node)

    def next_end(self):
        """Return the error of a process's calls at its end: by turns, as a draw would change all lives."""
        is_odd = next(self._num_ends) % 2
        return OutOfMemoryError("the node is low on memory") if is_odd else RayActorError()

    # The module ray.

    def answer(self, actor, ref, value):
        if ref in actor.pending and not ref.is_ready:
            actor.pending.remove(ref)
            ref.answer, ref.is_ready, self._is_changed = value, True, True

    def wait(self, refs, num_returns=1, timeout=None):
        self.check_alive()
        end_s, self.num_calls = self.timeline.now_s + timeout, self.num_calls + 1
        self._is_changed = True
        while True:
            if self._is_changed:
                self._is_changed = False
                here = [ref for ref in refs if ref.is_ready][:num_returns]
            if len(here) >= num_returns or self.timeline.now_s >= end_s:
                taken = set(here)
                return here, [ref for ref in refs if ref not in taken]
            self.timeline.next_event(end_s)
            self.check_alive()

    def get(self, ref, timeout=None):
        assert ref.is_ready, "the engine waits before it gets"
        if isinstance(ref.answer, Exception):
            raise ref.answer
        return ref.answer

    def kill(self, actor):
        actor.die()

    def check_alive(self):
        if self.current is not None and self.current.is_doomed:
            raise Killed

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "head", runtime_env={})

    def available_resources(self):
        free = sum(len(node.free) for node in self.nodes.values())
        return {"GPU": float(free), "CPU": float(free * CPUS_A_GPU)}

    def cluster_free(self):
        return {
            name: {"GPU": float(len(node.free)), "CPU": float(len(node.free) * CPUS_A_GPU)}
            for name, node in self.nodes.items()
        }

    def list(self):
        return [
            {
                "NodeID": name, "Alive": True, "NodeManagerAddress": f"10.0.0.{name}", "Labels": {},
                "Resources": {"GPU": float(node.gpus), "CPU": float(node.gpus * CPUS_A_GPU)},
            }
            for name, node in self.nodes.items()
        ]  # fmt: skip

    # The module of placement groups.

    def placement_group(self, bundles, strategy, _soft_target_node_id=None):
        name = f"group{next(self._number)}"
        self.groups[name] = Group(self.current, bundles[0], _soft_target_node_id, name)
        self.schedule_later()
        return self.groups[name]

    def placement_group_table(self, group=None):
        if group is not None:
            return self._row(group)
        return {name: self._row(each) for name, each in self.groups.items()}

    def remove_placement_group(self, group):
        if self.groups.pop(group.id.hex(), None) is not None and group.node is not None:
            group.node.free = sorted([*group.node.free, *group.held])
        for actor in self.actors[:]:
            if getattr(actor, "group", None) is group:
                actor.die()
        group.state, group.node = "REMOVED", None
        self.schedule_later()

    def _row(self, group):
        node = group.node.name if group.node else ""
        return {"state": group.state, "bundles_to_node_id": {0: node}}

    def end_driver(self, driver):
        """End what belongs to a driver, as Ray does when its process has ended."""
        for actor in [each for each in self.actors if each.owner is driver]:
            actor.die()
        for group in [each for each in self.groups.values() if each.owner is driver]:
            self.remove_placement_group(group)

    def place_of(self, group, number):
        node = group.node
        return WorkerLocation(
            node_id=node.name, address=f"10.0.0.{node.name}", pid=next(self._number) + 100,
            gpus=(str(group.held[number % len(group.held)]),),
        )  # fmt: skip

    # Their places in the engine.

    def take_the_place_of_ray(self, monkeypatch):
        for module in (actor_calls, attempt_start, node_monitor, placement_slots, ray_worker_group):
            monkeypatch.setattr(module, "ray", self)
        inventory = SimpleNamespace(nodes=self.list)
        monkeypatch.setattr(node_inventory, "ray", inventory)
        monkeypatch.setattr(node_inventory, "free_resources", self.cluster_free)
        monkeypatch.setattr(node_inventory, "declared_resources", dict)
        monkeypatch.setattr(node_inventory, "drain_deadlines_ms", self._deadlines_ms)
        for name in ("placement_group", "placement_group_table", "remove_placement_group"):
            monkeypatch.setattr(placement_slots, name, getattr(self, name))
        for module in (attempt_start, node_inventory, placement_slots, ray_worker_group):
            monkeypatch.setattr(module, "time", self.timeline)
        monkeypatch.setattr(checkpoint_committer, "Event", lambda: VirtualEvent(self.timeline))
        for module in (checkpoint_committer, journal):
            monkeypatch.setattr(module, "wait", self.timeline.wait)
        monkeypatch.setattr(placement_slots, "random", self.draw)
        monkeypatch.setattr(run_context, "TICK_S", TICK_S)

        def spawn(slots, slot, *, name, entry, is_forkable):
            slot.ordered_s = self.timeline.now_s
            slot.actor = self._make_worker(self, self.current, slot.group, slot.index)

        def spawn_monitor(monitors, node, slot):
            actor = Monitor(self, self.current, node)
            monitors._by_node[node] = MonitorSlot(
                index=-1, group=slot.group, actor=actor, node_id=node
            )
            return monitors._by_node[node]

        monkeypatch.setattr(placement_slots.WorkerSlots, "spawn", spawn)
        monkeypatch.setattr(node_monitor.NodeMonitors, "_spawn", spawn_monitor)

    def _deadlines_ms(self):
        return {
            name: int(node.leaves_s * 1000)
            for name, node in self.nodes.items()
            if node.leaves_s is not None
        }
