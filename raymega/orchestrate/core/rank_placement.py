"""Assigns ranks to workers by node ids, independent of the order in which Ray lists nodes.

It owns the rule that a tensor-parallel group stays on one node, the check that the cluster has room for
that, and the map from workers to ranks. It does not call Ray.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from raymega.config.parallel import ParallelSection
from raymega.errors import CapacityError, Fault, InternalError, counted
from raymega.messages import NodeSlots
from raymega.plan.grid import Grid

DOMAIN_LABEL = "ray.io/gpu-domain"
"""Ray's node label for the domain of nodes that share fast links, such as NVLink."""
ACCELERATOR_LABEL = "ray.io/accelerator-type"
ROUNDING = 1e-6
"""Float error that quotients of CPUs are allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLocation:
    """Location of a worker's process, as the process itself reports it.

    Attributes:
        node_id: Ray's id of the node. Addresses are not unique: nodes may share one.
        address: IP address for rendezvous.
        pid: Process id on that node.
        gpus: Indices of its GPUs on the node; empty on CPUs.
        domain: Domain of nodes with fast links, such as an NVLink rack; empty without the node label.
        accelerator: GPU type by the node label; empty without the label.
    """

    node_id: str
    address: str
    pid: int
    gpus: tuple[str, ...] = ()
    domain: str = ""
    accelerator: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignedRank:
    """A worker's rank and its index among the workers of its node."""

    rank: int
    local_rank: int


def block_size(grid: Grid, parallel: ParallelSection) -> int:
    """Return the number of workers that must share a node: a tp group, or 1 if it may span nodes."""
    return 1 if parallel.is_tp_across_nodes_allowed else grid.tp


def place_ranks(nodes: Sequence[NodeSlots], grid: Grid, *, block: int) -> tuple[str, ...]:
    """Return a node id for each rank, which shows that the run fits before Ray is asked for slots.

    Domains and nodes with most room are filled first, so that the run spans few. ``block`` is as in block_size.

    Raises:
        CapacityError: The nodes have too few slots, even if nothing else runs on them.
    """
    # worker slots in whole blocks, roomiest domain and node first
    room: Counter[str] = Counter()
    for node in nodes:
        room[node.labels.get(DOMAIN_LABEL, "")] += node.num_slots
    workers = [
        node.node_id
        for node in sorted(nodes, key=lambda node: _roomiest_first(node, room))
        for _ in range(node.num_slots // block * block)
    ][: grid.world_size]
    if len(workers) < grid.world_size:
        raise CapacityError(_no_room(nodes, grid, block))
    # ranks as assign_ranks would give them to workers on these nodes
    locations = [WorkerLocation(node_id=node_id, address="", pid=0) for node_id in workers]
    assigned_ranks = assign_ranks(locations, grid, block=block)
    by_rank = {
        assigned.rank: node_id for assigned, node_id in zip(assigned_ranks, workers, strict=True)
    }
    return tuple(by_rank[rank] for rank in range(grid.world_size))


def _roomiest_first(node: NodeSlots, room: Counter[str]) -> tuple[int, str, int, str]:
    domain = node.labels.get(DOMAIN_LABEL, "")
    return (-room[domain], domain, -node.num_slots, node.node_id)


def assign_ranks(
    locations: Sequence[WorkerLocation], grid: Grid, *, block: int
) -> tuple[AssignedRank, ...]:
    """Return a rank for each of ``locations``: tp groups fill node after node, domain after domain.

    Traffic between neighbours on the grid so stays inside a node, or else inside a domain, where possible.
    The result depends on domains, node ids and GPU indices only, so the same processes get the same
    ranks after a restart.

    Raises:
        InternalError: A node holds part of a tp group, which ``block`` forbids.
    """
    # indices of the workers in the order in which tp groups take them
    queue: list[int] = []
    for node_id, workers in _by_node(locations):
        if len(workers) % block:
            raise InternalError(
                fact=f"node {node_id} holds {counted(len(workers), 'worker')}",
                rule=f"it must hold a multiple of {block}, for a tp group may not span nodes",
                remedy="reserve each tp group as one bundle",
            )
        queue += workers
    ranks = [rank for group in grid.groups("tp") for rank in group]
    rank_of = dict(zip(queue, ranks, strict=True))
    return _with_local_ranks(locations, rank_of)


def choose_ranks(
    locations: Sequence[WorkerLocation], ranks: Sequence[int], grid: Grid, *, block: int
) -> tuple[int, ...] | None:
    """Return a rank for each of ``locations``, -1 for those not needed; None when there are too few.

    A process keeps its rank where possible. A tp group that lost a member takes a process without a rank
    on its own node; if there is none, the whole group moves to a node that has room.

    Args:
        locations: Processes that could train; more or fewer than the grid has ranks.
        ranks: Last rank of each process; -1 for none.
        grid: Grid whose ranks are assigned.
        block: Number of workers that must share a node, see block_size.
    """
    if len(locations) < grid.world_size:
        return None
    # holder: index of the process by rank; free: processes without a rank, by node
    holder = {rank: index for index, rank in enumerate(ranks) if 0 <= rank < grid.world_size}
    free = {node: [i for i in here if ranks[i] not in range(grid.world_size)]
            for node, here in _by_node(locations)}  # fmt: skip
    groups = list(grid.groups("tp")) if block > 1 else [(r,) for r in range(grid.world_size)]
    # groups that can be completed on their own node; the others have to move
    moving = []
    for group in groups:
        nodes = {locations[holder[rank]].node_id for rank in group if rank in holder}
        lacking = [rank for rank in group if rank not in holder]
        if len(nodes) == 1 and len(free[min(nodes)]) >= len(lacking):
            holder |= {rank: free[min(nodes)].pop(0) for rank in lacking}
        else:
            moving.append(group)
    # free what the moving groups still hold, before any of them takes a place
    for group in moving:
        for index in (holder.pop(rank) for rank in group if rank in holder):
            free[locations[index].node_id].append(index)
    room = _Room({location.node_id: location.domain for location in locations}, free)
    for group in moving:
        last = locations[holder[group[0] - 1]].node_id if group[0] - 1 in holder else ""
        taken = room.take(len(group), last)
        if not taken:
            return None
        holder.update(zip(group, taken, strict=True))
    rank_of = {index: rank for rank, index in holder.items()}
    return tuple(rank_of.get(index, -1) for index in range(len(locations)))


class _Room:
    """Free processes by node, from which groups are taken; each costs the logarithm of the number of nodes."""

    def __init__(self, domains: dict[str, str], free: dict[str, list[int]]) -> None:
        self._domains, self._free = domains, free
        # heaps of (-number of free processes, node), of each domain and of all (None); stale entries are skipped
        self._heaps: dict[str | None, list[tuple[int, str]]] = defaultdict(list)
        for node in free:
            self._add(node)

    def take(self, number: int, last: str) -> list[int]:
        """Take ``number`` processes of one node, the node ``last`` of the preceding rank first; [] for none.

        The next choices are the roomiest node of its domain, and the roomiest of all.
        """
        near = self._domains.get(last, "")
        if len(self._free.get(last, ())) >= number:
            node = last
        else:
            node = self._roomiest(near, number) or self._roomiest(None, number)
        if not node:
            return []
        here = self._free[node]
        taken, here[:number] = here[:number], []
        self._add(node)
        return taken

    def _roomiest(self, domain: str | None, number: int) -> str:
        """Return the roomiest node of a domain, or of all; '' if it has no room for ``number``."""
        heap = self._heaps[domain]
        while heap and -heap[0][0] != len(self._free[heap[0][1]]):
            heappop(heap)
        return heap[0][1] if heap and -heap[0][0] >= number else ""

    def _add(self, node: str) -> None:
        for domain in (self._domains[node], None):
            heappush(self._heaps[domain], (-len(self._free[node]), node))


def keep_ranks(
    locations: Sequence[WorkerLocation], ranks: Sequence[int], grid: Grid, *, block: int
) -> tuple[AssignedRank, ...] | None:
    """Return seats with the given ranks, which the workers had or were named for; None if illegal.

    They are legal if each tp group shares a node and ranks ascend with GPU indices on each node. With that
    order, ranks that communicate across nodes use the same network card.
    """
    # tp groups on one node each
    node_of = {rank: location.node_id for rank, location in zip(ranks, locations, strict=True)}
    for group in grid.groups("tp"):
        if block > 1 and len({node_of[rank] for rank in group}) > 1:
            return None
    # ranks in the order of GPU indices
    for _, workers in _by_node(locations):
        here = sorted(workers, key=lambda index: ranks[index])
        gpus = [[_number(gpu) for gpu in locations[index].gpus] for index in here]
        if gpus != sorted(gpus):
            return None
    return _with_local_ranks(locations, dict(enumerate(ranks)))


def _by_node(locations: Sequence[WorkerLocation]) -> list[tuple[str, list[int]]]:
    """Return the workers' indices by node, in order of their GPUs; nodes of a domain are adjacent."""
    # group by node, sort each node by GPU, then sort the nodes by domain
    nodes: dict[str, list[int]] = defaultdict(list)
    for index, location in enumerate(locations):
        nodes[location.node_id].append(index)
    for workers in nodes.values():
        workers.sort(key=lambda index: ([_number(gpu) for gpu in locations[index].gpus], index))
    return sorted(nodes.items(), key=lambda item: (locations[item[1][0]].domain, item[0]))


def _number(gpu: str) -> tuple[int, str]:
    """Return a sort key of a GPU's index; ids that are not numbers, such as UUIDs, come last by name."""
    return (int(gpu), "") if gpu.isdecimal() else (2**31, gpu)


def _with_local_ranks(
    locations: Sequence[WorkerLocation], rank_of: dict[int, int]
) -> tuple[AssignedRank, ...]:
    # local ranks count upwards in the order of ranks on each node
    num_seated: dict[str, int] = defaultdict(int)
    assigned_ranks: dict[int, AssignedRank] = {}
    for index in sorted(rank_of, key=lambda index: rank_of[index]):
        node_id = locations[index].node_id
        assigned_ranks[index] = AssignedRank(rank=rank_of[index], local_rank=num_seated[node_id])
        num_seated[node_id] += 1
    return tuple(assigned_ranks[index] for index in range(len(locations)))


def _no_room(nodes: Sequence[NodeSlots], grid: Grid, block: int) -> Fault:
    slots = sorted((node.num_slots for node in nodes), reverse=True)
    shown = ", ".join(map(str, slots[:8])) + (", ..." if len(slots) > 8 else "")
    # slots that do not make up a whole block are of no use
    total = sum(number // block * block for number in slots)
    whole = f" in tp groups of {block}, each whole on a node" if block > 1 else ""
    needs_gpu = any(node.needs_gpu for node in nodes)
    fact = f"the cluster has {counted(len(nodes), 'node')} with {shown or 'no'} worker slots"
    if needs_gpu and not any(node.gpus >= 1 for node in nodes):
        many = f"none of the cluster's {len(nodes)} nodes has a GPU"
        fact = f"cluster.device=cuda, and {many if len(nodes) > 1 else 'no node has a GPU'}"
    return Fault(
        fact=fact,
        rule=f"grid {grid.describe()} needs {counted(grid.world_size, 'worker')}{whole}"
        f"{', each with a GPU' if needs_gpu else ''}; there is room for {total}",
        remedy=_more_room(nodes, grid, block, needs_gpu=needs_gpu),
    )


def _more_room(nodes: Sequence[NodeSlots], grid: Grid, block: int, *, needs_gpu: bool) -> str:
    """Return what makes the run fit: fewer CPUs a worker where they are what lacks, else nodes."""
    if needs_gpu and sum(int(node.gpus) // block * block for node in nodes) < grid.world_size:
        return (
            "give --address of a cluster with GPUs, or --set cluster.device=cpu to try it on CPUs"
        )
    # the largest share of a CPU with which every worker has a place
    sizes = Counter(node.cpus for node in nodes if node.cpus)
    shares = (
        cpus / number for cpus in sizes for number in range(block, grid.world_size + 1, block)
    )
    fitting = [
        share
        for share in map(_rounded_down, shares)
        if share
        and sum(n * _blocks(cpus, share, block) for cpus, n in sizes.items()) >= grid.world_size
    ]
    if not fitting:
        return "add nodes, or use a smaller grid"
    return f"use --set cluster.cpus_per_worker={max(fitting):g}, add nodes, or use a smaller grid"


def _rounded_down(share: float) -> float:
    """Return ``share`` of a CPU with at most three decimals, or as a whole number above 1."""
    return float(int(share)) if share >= 1 else int(share * 1000) / 1000


def _blocks(cpus: float, share: float, block: int) -> int:
    """Return the workers, in whole blocks, that ``share`` of a CPU each lets a node hold."""
    return int(cpus / share + ROUNDING) // block * block
