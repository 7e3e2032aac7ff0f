"""The slots of a run on Ray: what is reserved, and the process that sits in each slot.

Each block of workers that must be together is a placement group of its own: a node that is lost takes
whole groups with it, which are asked for anew, and the others keep theirs with their processes. (One
group for all would keep them too; but Ray looks for room for a group's lost bundles without a pause,
with all of a CPU of the head, until a node comes: https://github.com/ray-project/ray/pull/65007.)
So a run could hold half of what it needs while another holds the other half; it gives that back after
a while. Calls are not made here.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raymega.config.schema import ClusterSection
from raymega.errors import Fault
from raymega.orchestrate.cluster.node_inventory import (
    Device,
    DrainingNodes,
    find_device,
    list_nodes,
    worker_resources,
)
from raymega.orchestrate.core.rank_placement import DOMAIN_LABEL, AssignedRank, WorkerLocation
from raymega.orchestrate.core.worker_group_api import NodeDrain
from raymega.orchestrate.workers.worker_actor import MAX_CONCURRENCY, Worker
from raymega.plan.grid import Grid
from raymega.plan.run_plan import RunPlan

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.02
HALF_S = 10.0
"""At least so long, and at most twice so long, half of the slots are held while nobody works in them."""
PAUSE_S = 2.0
"""Then none are asked for: Ray looks once a second whether what others wait for is free."""
NAMED_AXES = ("tp", "pp", "dp")


@dataclass(kw_only=True, slots=True, eq=False)
class WorkerSlot:
    """One worker's share of what is reserved, and who sits in it.

    Attributes:
        index: Among all slots.
        group: The placement group that it is a part of, with its block.
        is_spare: Beyond what the grid needs that was asked for.
        home: The rank that it had last, or is expected to get; -1 for none.
        actor: Its process, or the order for one; None when there is neither.
        location: Where the process lives, once it has said so.
        is_warm: The process has loaded what it needs to train.
        assigned: Its rank in the present attempt, if it takes part.
        respawn_at_s: No new process before then.
        ordered_s: When its process was ordered.
    """

    index: int
    group: PlacementGroup
    is_spare: bool = False
    home: int = -1
    actor: ActorHandle[Any] | None = None  # an actor class made at run time has no static type
    location: WorkerLocation | None = None
    is_warm: bool = False
    assigned: AssignedRank | None = None
    respawn_at_s: float = 0.0
    ordered_s: float = 0.0

    @property
    def rank(self) -> int:
        """In the present attempt; -1 for none."""
        return self.assigned.rank if self.assigned else -1

    def clear(self) -> None:
        """Its process is gone."""
        self.actor, self.location, self.is_warm = None, None, False


class WorkerSlots:
    """Asks for slots, starts processes in them, and gives them back."""

    def __init__(self, cluster: ClusterSection, *, can_grow: bool) -> None:
        """Asks for nothing yet."""
        self._cluster, self._can_grow = cluster, can_grow
        self.device: Device = "cpu"
        self.slots: list[WorkerSlot] = []
        self._patient_until_s = self._pause_until_s = 0.0
        self._draining_nodes = DrainingNodes()
        self._replaced: set[int] = set()

    @property
    def are_asked_for(self) -> bool:
        """Ray knows what the run needs."""
        return bool(self.slots)

    @property
    def may_be_asked_for(self) -> bool:
        """They are not, and nobody else is let go first."""
        return not self.slots and time.monotonic() > self._pause_until_s

    def ask(
        self, *, num_workers: int, num_spares: int, block: int, nodes: Sequence[str] = ()
    ) -> None:
        """Reserve slots, ``block`` workers at a time, which Ray cannot part.

        Args:
            num_workers: Of the grid.
            num_spares: Beside them; nobody waits for these.
            block: Workers that must be together on a node.
            nodes: One that has room for each block of the grid, as far as there are such nodes;
                without, Ray spreads them.
        """
        self.device = find_device(self._cluster)
        if (self._cluster.device, self.device, self._can_grow) == ("auto", "cpu", True):
            log.warning(
                "cluster.device=auto takes cpu: no node has a GPU, and Ray knows of no node type with "
                "one; set cluster.device=cuda to wait for GPU nodes"
            )
        self._patient_until_s = time.monotonic() + HALF_S * (1 + random.random())
        self._reserve(num_workers, block, nodes=nodes)
        self._reserve(num_spares, block, is_spare=True)

    def wait(self, timeout_s: float) -> bool:
        """Whether the grid's slots are all held to stay; looks for ``timeout_s`` at most.

        Ray's own wait takes whole seconds, and cuts off the rest.
        """
        end_s, lacking = time.monotonic() + timeout_s, self._main
        while not self.slots or (lacking := [group for group in lacking if not _is_held(group)]):
            if time.monotonic() + LOOK_EVERY_S > end_s:
                return False
            time.sleep(LOOK_EVERY_S)
        return not any(map(self.is_leaving, self.slots))

    @property
    def are_held(self) -> bool:
        """Whether no node of the grid's slots is lost, as far as Ray knows."""
        return all(map(_is_held, self._main))

    def give_back_half(self) -> None:
        """Let go, for a while, of slots that wait for others, and that another run may wait for."""
        is_late = time.monotonic() > self._patient_until_s
        if is_late and not any(slot.actor for slot in self.slots):
            held = [group for group in self._main if _is_held(group)]
            if 0 < len(held) < len(self._main):
                log.info("gives back %d of %d slots' groups", len(held), len(self._main))
                self.release()
                self._pause_until_s = time.monotonic() + PAUSE_S

    def lost(self) -> list[WorkerSlot]:
        """Those whose node is gone, as far as Ray knows."""
        empty = _groups(slot for slot in self.slots if slot.location is None)
        gone = {group for group in empty if placement_group_table(group)["state"] == "RESCHEDULING"}
        return [slot for slot in self.slots if slot.group in gone]

    def ask_anew(self, slots: Sequence[WorkerSlot]) -> None:
        """Give up the groups of ``slots``, in which nobody is left, for others of their size."""
        for group in _groups(slots):
            remove_placement_group(group)
            (bundle,) = group.bundle_specs
            other = placement_group([bundle], strategy="STRICT_PACK")
            for slot in slots:
                if slot.group == group:
                    slot.group = other

    def expected_locations(self) -> list[WorkerLocation]:
        """Where the process of each of the grid's slots will be: where Ray has put the groups."""
        node_of = {group: _node_of(group) for group in self._main}
        domains = {n.node_id: n.labels.get(DOMAIN_LABEL, "") for n in list_nodes(self._cluster)}
        nodes = [node_of[slot.group] for slot in self.slots if not slot.is_spare]
        return [
            WorkerLocation(node_id=n, address="", pid=0, domain=domains.get(n, "")) for n in nodes
        ]

    @property
    def ready(self) -> list[WorkerSlot]:
        """Those whose process could take a rank now: it has loaded, and its node stays."""
        return [slot for slot in self.living if slot.is_warm]

    @property
    def living(self) -> list[WorkerSlot]:
        """Those with a process, loaded or not, whose node stays."""
        return [slot for slot in self.slots if slot.location and not self.is_leaving(slot)]

    def loading(self) -> list[WorkerSlot]:
        """Those on nodes that live whose process is not ready yet, ordered or about to be."""
        awaited = [slot for slot in self.slots if not slot.is_warm]
        living = {node.node_id for node in list_nodes(self._cluster)}
        node_of = {group: _node_of(group) for group in _groups(awaited)}
        return [slot for slot in awaited if node_of[slot.group] in living]

    def stuck(self, limit_s: float) -> list[WorkerSlot]:
        """Those whose process was ordered as long ago as a start may take, and has not loaded."""
        now_s, almost = time.monotonic(), 0.9 * limit_s
        loading = [slot for slot in self.slots if slot.actor is not None and not slot.is_warm]
        return [slot for slot in loading if now_s - slot.ordered_s > almost]

    def is_leaving(self, slot: WorkerSlot) -> bool:
        """Its node will be taken away, as far as Ray was asked."""
        return slot.location is not None and self._draining_nodes.is_leaving(slot.location.node_id)

    def drain(self, block: int) -> NodeDrain | None:
        """Who has a rank and must leave, and how many seconds the first of them has; nobody is ready.

        Slots in their place are asked for, once: spares, which one of them becomes when it is lost.
        """
        seconds = self._draining_nodes.poll()
        going = [slot for slot in self.slots if slot.assigned and self.is_leaving(slot)]
        new = {slot.index for slot in going} - self._replaced
        if new:
            self._replaced |= new
            self._reserve(-(-len(new) // block) * block, block, is_spare=True)
        left = [seconds[slot.location.node_id] for slot in going if slot.location]
        ranks = tuple(sorted(slot.rank for slot in going))
        return NodeDrain(seconds=min(left), ranks=ranks, is_ready=False) if left else None

    def spawn(self, slot: WorkerSlot, *, name: str, entry: str) -> None:
        """Order a process. Ray sets OMP_NUM_THREADS to its whole CPUs, at least 1, unless it is set.

        A runtime environment would do no more, and would keep Ray from using an idle process.
        """
        options = {
            "name": name,
            "num_cpus": self._cluster.cpus_per_worker,
            "num_gpus": 1 if self.device == "cuda" else 0,
            "max_concurrency": MAX_CONCURRENCY,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=slot.group, placement_group_bundle_index=0
            ),
        }
        slot.ordered_s = time.monotonic()
        slot.actor = cast(ActorHandle[Any], ray.remote(Worker).options(**options).remote(entry))

    def release(self) -> None:
        """Kill every process and give every slot back."""
        kill(self.slots)
        for group in _groups(self.slots):
            remove_placement_group(group)
        self.slots = []

    def not_free(self, grid: Grid, *, block: int) -> Fault:
        """Why the slots are not held yet."""
        free = ray.available_resources()  # type: ignore[no-untyped-call]
        needs = worker_resources(self.device, self._cluster.cpus_per_worker)
        shown = ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in needs)
        each = ", ".join(f"{amount:g} {kind}" for kind, amount in needs.items())
        return Fault(
            fact=f"the cluster has {shown} free",
            rule=f"grid {grid.describe()} needs {grid.world_size} workers of {each} "
            f"each, {block} together on a node",
            remedy="wait for other jobs, add nodes, or raise cluster.capacity_timeout_s",
        )

    @property
    def _main(self) -> list[PlacementGroup]:
        return _groups(slot for slot in self.slots if not slot.is_spare)

    def _reserve(
        self, num_workers: int, block: int, *, is_spare: bool = False, nodes: Sequence[str] = ()
    ) -> None:
        needs = worker_resources(self.device, self._cluster.cpus_per_worker)
        bundle = {kind: round(amount * block, 4) for kind, amount in needs.items()}
        for first in range(0, num_workers, block):
            near = nodes[first // block] if first // block < len(nodes) else None
            group = placement_group([bundle], strategy="STRICT_PACK", _soft_target_node_id=near)
            for _ in range(min(block, num_workers - first)):
                self.slots.append(WorkerSlot(index=len(self.slots), group=group, is_spare=is_spare))


def _groups(slots: Iterable[WorkerSlot]) -> list[PlacementGroup]:
    """Of ``slots``, each once."""
    return list(dict.fromkeys(slot.group for slot in slots))


def _is_held(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group)["state"] == "CREATED")


def _node_of(group: PlacementGroup) -> str:
    """Id of the node that it is on, or was last; '' for none."""
    return str(placement_group_table(group)["bundles_to_node_id"].get(0, ""))


def kill(slots: Sequence[WorkerSlot]) -> None:
    """End the processes of ``slots``."""
    for slot in slots:
        if slot.actor is not None:
            ray.kill(slot.actor)
        slot.clear()


def name_of(slot: WorkerSlot, plan: RunPlan, *, attempt: int) -> str:
    """Of its process, for people: run, attempt, rank and coordinates; Ray wants no name twice."""
    if slot.home < 0 or not attempt:  # between attempts another slot may have had that rank
        return f"{plan.job.run.name}/a{attempt}/spare{slot.index}-{time.monotonic_ns()}"
    return actor_name(plan, attempt=attempt, rank=slot.home)


def actor_name(plan: RunPlan, *, attempt: int, rank: int) -> str:
    """Such as ``demo/a1/rank3-tp1-pp0-dp1``."""
    coords = plan.grid.coords(rank)
    axes = [f"{axis}{coords.on(axis)}" for axis in NAMED_AXES]
    return "/".join((plan.job.run.name, f"a{attempt}", "-".join((f"rank{rank}", *axes))))
