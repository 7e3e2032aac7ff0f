"""The slots of a run on Ray: reserved placement groups, and the worker process in each slot.

Each block of workers that must share a node has a placement group of its own. A lost node takes whole groups
with it, which are requested again, while the others keep their processes. A single group for all would keep
them too, but Ray searches room for its lost bundles in a busy loop on the head until a node joins:
https://github.com/ray-project/ray/pull/65007. With many groups, two runs could each hold half of what they
need, so a run releases a part of its slots after a while. Calls to workers are in ``workers/actor_calls.py``.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
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
from raymega.errors import Fault, counted
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
"""Time for which an incomplete set of slots without processes is held, in seconds; at random up to twice that."""
PAUSE_S = 2.0
"""Pause after releasing them, in seconds; Ray tries pending groups of other runs once a second."""
FEW_GROUPS = 8
"""Number of placement groups up to which each is asked about in a call of its own."""
NAMED_AXES = ("tp", "cp", "ep", "pp", "dp")
RARE_AXES = ("cp", "ep")
"""Axes that a name leaves out where the grid does not use them."""
OWN_PACKAGES = {"pip", "uv", "conda", "container", "image_uri", "py_executable"}
"""Keys of a job's runtime_env under which Ray itself chooses the interpreter."""


@dataclass(kw_only=True, slots=True, eq=False)
class WorkerSlot:
    """A worker's share of a placement group, and the process in it.

    Attributes:
        index: Index among all slots of the run.
        group: Placement group of its block of workers.
        is_spare: True for a slot beyond those of the grid.
        home: Rank that it had last, or is expected to get; -1 for none.
        actor: Actor handle of its process, which may still be starting; None without one.
        location: Location of the process, once it has reported it.
        is_warm: True when the process has loaded what it needs to train.
        assigned: Rank in the present attempt; None if it takes no part.
        respawn_at_s: Time before which no new process is started, in seconds of time.monotonic.
        ordered_s: Time at which its process was started, in seconds of time.monotonic.
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
        """Rank in the present attempt; -1 for none."""
        return self.assigned.rank if self.assigned else -1

    def clear(self) -> None:
        """Forget the process, which is gone; the slot stays reserved."""
        self.actor, self.location, self.is_warm = None, None, False


class WorkerSlots:
    """All slots of a run: requests them from Ray, starts processes in them, and releases them."""

    def __init__(
        self,
        cluster: ClusterSection,
        *,
        can_grow: bool,
        py_executable: Callable[[], str] | None = None,
    ) -> None:
        """Prepare without slots.

        Args:
            cluster: Resources of a worker.
            can_grow: Whether nodes may still join the cluster.
            py_executable: Function that returns the command in place of ``python`` for workers on the
                driver's node; None leaves it to Ray.
        """
        self._cluster, self._can_grow, self._py_executable = cluster, can_grow, py_executable
        self.device: Device = "cpu"
        self.slots: list[WorkerSlot] = []
        self._patient_until_s = self._pause_until_s = 0.0
        self._draining_nodes = DrainingNodes()
        self._num_reserved = 0  # slots so far; the next one's index
        self._replaced: set[WorkerSlot] = set()  # draining slots with a substitute

    @property
    def are_asked_for(self) -> bool:
        """True when slots are requested or held."""
        return bool(self.slots)

    @property
    def may_be_asked_for(self) -> bool:
        """True when no slots are requested and the pause after a release is over."""
        return not self.slots and time.monotonic() > self._pause_until_s

    def ask(
        self, *, num_workers: int, num_spares: int, block: int, nodes: Sequence[str] = ()
    ) -> None:
        """Request slots in groups of ``block`` workers, each of which Ray places on one node.

        Args:
            num_workers: Number of workers of the grid.
            num_spares: Number of further slots, for which no attempt waits.
            block: Number of workers that must share a node.
            nodes: Ids of nodes with room, one for each block of the grid, as far as there are such nodes;
                Ray chooses the nodes of further blocks.
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
        """Wait ``timeout_s`` seconds at most, all of them without slots; return whether the grid's are held, on nodes that stay."""
        # polls, because PlacementGroup.wait takes whole seconds only
        end_s, lacking = time.monotonic() + timeout_s, self._main
        while not self.slots or (lacking := _without_room(lacking)):
            if time.monotonic() + LOOK_EVERY_S > end_s:
                return False
            time.sleep(LOOK_EVERY_S)
        return not any(map(self.is_leaving, self.slots))

    @property
    def are_held(self) -> bool:
        """True when every slot of the grid is held, so that none is on a lost node, as far as Ray knows."""
        return not _without_room(self._main)

    def give_back_half(self) -> None:
        """Release an incomplete set of slots for PAUSE_S, so that another run can use them."""
        # only while no process runs in any of them
        is_late = time.monotonic() > self._patient_until_s
        if is_late and not any(slot.actor for slot in self.slots):
            main = self._main
            num_held = len(main) - len(_without_room(main))
            if 0 < num_held < len(main):
                log.info(
                    "%d of %d placement groups were held; releasing them for other runs",
                    num_held,
                    len(main),
                )
                self.release()
                self._pause_until_s = time.monotonic() + PAUSE_S

    def lost(self) -> list[WorkerSlot]:
        """Return the slots whose node is gone, as far as Ray knows."""
        # groups with a location have a process, whose end a failed call reports
        empty = _groups(slot for slot in self.slots if slot.location is None)
        gone = {group for group, row in _look_at(empty).items() if row["state"] == "RESCHEDULING"}
        return [slot for slot in self.slots if slot.group in gone]

    def replaced(self) -> list[WorkerSlot]:
        """Return the slots of blocks on drained nodes that have a substitute and no rank any more."""
        in_use = {slot.group for slot in self.slots if slot.assigned}
        left = {slot.group for slot in self._replaced} - in_use
        return [slot for slot in self.slots if slot.group in left] if left else []

    def give_back(self, old: Sequence[WorkerSlot]) -> None:
        """Release ``old``, which have no process any more; their substitutes become slots of the grid."""
        for group in _groups(old):
            remove_placement_group(group)
        self._replaced.difference_update(old)
        gone = set(old)
        self.slots = [slot for slot in self.slots if slot not in gone]
        self._promote(sum(not slot.is_spare for slot in old))

    def _promote(self, number: int) -> None:
        """Make ``number`` spare slots slots of the grid: those with ranks first, then those on nodes that stay."""
        spares = [slot for slot in self.slots if slot.is_spare and slot not in self._replaced]
        blocks = _groups(sorted(spares, key=lambda slot: (slot.assigned is None, slot.index)))
        for group in blocks:
            here = [slot for slot in spares if slot.group == group]
            if len(here) <= number:
                number -= len(here)
                for slot in here:
                    slot.is_spare = False

    def ask_anew(self, slots: Sequence[WorkerSlot]) -> None:
        """Replace the groups of ``slots``, which have no process, by their substitutes or by new ones of the same size."""
        others: dict[PlacementGroup, PlacementGroup] = {}
        have_others = {slot.group for slot in self._replaced}
        self.give_back([slot for slot in slots if slot.group in have_others])
        slots = [slot for slot in slots if slot.group not in have_others]
        for group in _groups(slots):
            remove_placement_group(group)
            others[group] = placement_group(group.bundle_specs, strategy="STRICT_PACK")
        for slot in slots:
            slot.group = others[slot.group]

    def expected_locations(self) -> list[WorkerLocation]:
        """Return the location of each of the grid's slots, by the nodes of their placement groups."""
        node_of = _nodes_of(self._main)
        domains = {n.node_id: n.labels.get(DOMAIN_LABEL, "") for n in list_nodes(self._cluster)}
        nodes = [node_of[slot.group] for slot in self.slots if not slot.is_spare]
        return [
            WorkerLocation(node_id=n, address="", pid=0, domain=domains.get(n, "")) for n in nodes
        ]

    @property
    def ready(self) -> list[WorkerSlot]:
        """Slots whose process could take a rank now: it has loaded, and its node is not draining."""
        return [slot for slot in self.living if slot.is_warm]

    @property
    def living(self) -> list[WorkerSlot]:
        """Slots with a process, loaded or not, whose node is not draining."""
        return [slot for slot in self.slots if slot.location and not self.is_leaving(slot)]

    def loading(self) -> list[WorkerSlot]:
        """Return the slots on live nodes whose process has not loaded yet or is about to be started."""
        awaited = [slot for slot in self.slots if not slot.is_warm]
        living = {node.node_id for node in list_nodes(self._cluster)}
        node_of = _nodes_of(_groups(awaited))
        return [slot for slot in awaited if node_of[slot.group] in living]

    def stuck(self, limit_s: float) -> list[WorkerSlot]:
        """Return the slots whose process has not loaded in the time ``limit_s`` of a start, in seconds."""
        # a little less than the limit: processes are started a moment after their attempt's clock
        now_s, almost = time.monotonic(), 0.9 * limit_s
        loading = [slot for slot in self.slots if slot.actor is not None and not slot.is_warm]
        return [slot for slot in loading if now_s - slot.ordered_s > almost]

    def is_leaving(self, slot: WorkerSlot) -> bool:
        """Return whether the slot's node was draining at the last look."""
        return slot.location is not None and self._draining_nodes.is_leaving(slot.location.node_id)

    def drain(self, block: int) -> NodeDrain | None:
        """Return the drain of nodes that host ranks, if any, with ``is_ready`` false.

        Spare slots in place of the draining ones are requested once.
        """
        seconds = self._draining_nodes.poll()
        if not seconds:
            return None
        going = [slot for slot in self.slots if slot.assigned and self.is_leaving(slot)]
        if new := set(going) - self._replaced:
            self._replaced |= new
            self._reserve(-(-len(new) // block) * block, block, is_spare=True)
        left = [seconds[slot.location.node_id] for slot in going if slot.location]
        ranks = tuple(sorted(slot.rank for slot in going))
        return NodeDrain(seconds=min(left), ranks=ranks, is_ready=False) if left else None

    def forkable(self) -> set[PlacementGroup]:
        """Return the groups whose workers can be forked from a process of the driver: same node, same packages."""
        here = ray.get_runtime_context()
        if not self._py_executable or OWN_PACKAGES & here.runtime_env.keys():
            return set()
        nodes = _nodes_of(_groups(slot for slot in self.slots if slot.actor is None))
        return {group for group, node in nodes.items() if node == here.get_node_id()}

    def spawn(self, slot: WorkerSlot, *, name: str, entry: str, is_forkable: bool) -> None:
        """Start an actor of the class Worker in ``slot``, with the name ``name``; see ``forkable``.

        Ray sets OMP_NUM_THREADS to the actor's whole CPUs, at least 1, unless it is set.
        """
        # no restarts: the driver decides about a lost process
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
        if self._py_executable and is_forkable:
            options["runtime_env"] = {"py_executable": self._py_executable()}
        slot.ordered_s = time.monotonic()
        slot.actor = cast(ActorHandle[Any], ray.remote(Worker).options(**options).remote(entry))

    def release(self) -> None:
        """Kill every process and release every slot."""
        kill(self.slots)
        for group in _groups(self.slots):
            remove_placement_group(group)
        self.slots = []
        self._replaced.clear()

    def not_free(self, grid: Grid, *, block: int) -> Fault:
        """Return a fault that says why the slots are not held yet: free resources and those needed."""
        free = ray.available_resources()  # type: ignore[no-untyped-call]
        needs = worker_resources(self.device, self._cluster.cpus_per_worker)
        shown = ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in needs)
        each = ", ".join(f"{amount:g} {kind}" for kind, amount in needs.items())
        return Fault(
            fact=f"the cluster has {shown} free",
            rule=f"grid {grid.describe()} needs {counted(grid.world_size, 'worker')} of {each} "
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
        # one bundle a block: a bundle is always on one node
        bundle = {kind: round(amount * block, 4) for kind, amount in needs.items()}
        for first in range(0, num_workers, block):
            near = nodes[first // block] if first // block < len(nodes) else None
            group = placement_group([bundle], strategy="STRICT_PACK", _soft_target_node_id=near)
            for _ in range(min(block, num_workers - first)):
                slot = WorkerSlot(index=self._num_reserved, group=group, is_spare=is_spare)
                self.slots.append(slot)
                self._num_reserved += 1


def _groups(slots: Iterable[WorkerSlot]) -> list[PlacementGroup]:
    """Return the placement groups of ``slots``, each once."""
    return list(dict.fromkeys(slot.group for slot in slots))


def _look_at(groups: Sequence[PlacementGroup]) -> dict[PlacementGroup, dict[str, Any]]:
    """Return Ray's row of each group: one by one while they are few, else all in one call."""
    # the table of all also has the cluster's other groups, and those removed lately
    if len(groups) <= FEW_GROUPS:
        return {group: placement_group_table(group) for group in groups}
    table = placement_group_table()
    return {group: table[group.id.hex()] for group in groups}


def _without_room(groups: Sequence[PlacementGroup]) -> list[PlacementGroup]:
    return [group for group, row in _look_at(groups).items() if row["state"] != "CREATED"]


def _nodes_of(groups: Sequence[PlacementGroup]) -> dict[PlacementGroup, str]:
    """Return the id of each group's present or last node; '' for none."""
    return {group: row["bundles_to_node_id"].get(0, "") for group, row in _look_at(groups).items()}


def kill(slots: Sequence[WorkerSlot]) -> None:
    """Kill the processes of ``slots``."""
    for slot in slots:
        if slot.actor is not None:
            ray.kill(slot.actor)
        slot.clear()


def name_of(slot: WorkerSlot, plan: RunPlan, *, attempt: int) -> str:
    """Return the actor name of the slot's process: run, attempt, rank and coordinates; unique in Ray."""
    if slot.home < 0 or not attempt:  # between attempts another slot may have had that rank
        return f"{plan.job.run.name}/a{attempt}/spare{slot.index}-{time.monotonic_ns()}"
    return actor_name(plan, attempt=attempt, rank=slot.home)


def actor_name(plan: RunPlan, *, attempt: int, rank: int) -> str:
    """Return the actor name of a rank, such as ``demo/a1/rank3-tp1-pp0-dp1``."""
    coords, experts = plan.grid.coords(rank), plan.grid.expert_coords(rank)
    axes = [
        f"{axis}{experts.ep if axis == 'ep' else coords.on(axis)}"
        for axis in NAMED_AXES
        if axis not in RARE_AXES or plan.grid.degree(axis) > 1
    ]
    return "/".join((plan.job.run.name, f"a{attempt}", "-".join((f"rank{rank}", *axes))))
