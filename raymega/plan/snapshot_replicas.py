"""Place the copies of a rank's state in the memory of nodes, and estimate their cost.

A snapshot of a rank's share has two copies: on its own node, and in the snapshot server of its
partner, the next node round. Whichever node is lost, the other copy survives.
``raymega.orchestrate.workers.snapshot_holders`` starts and calls snapshot servers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raymega.errors import Fault
from raymega.plan.run_plan import RunPlan
from raymega.plan.save_cost import share_bytes

GIB_BYTES = 2**30
NUM_GENERATIONS = 2
"""Number of snapshots on each node that keeps a copy: the newest whole one and the one that is
being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotCost:
    """Cost of one rank's snapshots to its node and its partner.

    Attributes:
        share_bytes: Bytes that the rank writes of one snapshot.
        buffer_bytes: Host memory of its node, at most: buffers that the rank copies to, of which
            its snapshot server has a view.
        server_bytes: Host memory of the partner's snapshot server, at most.
        sent_bytes: Bytes sent from the rank's node for one snapshot.
    """

    share_bytes: int
    buffer_bytes: int
    server_bytes: int
    sent_bytes: int


def partners(nodes: Sequence[str]) -> dict[str, str]:
    """Return the partner of each node that occurs in ``nodes``: the next one by name, round.

    Each node is the partner of one other, so that none keeps more than two nodes' copies. A single
    node is its own partner, and then there is one copy.
    """
    # a ring by name: each node's partner is the next one, the last one's the first
    ring = sorted(set(nodes))
    return dict(zip(ring, (*ring[1:], *ring[:1]), strict=True))


def copy_nodes(node_of: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return for each rank the nodes that keep its share: its own and the partner.

    Args:
        node_of: Name of the node of each rank.
    """
    partner = partners(node_of)
    # A single node is its own partner: dict.fromkeys keeps it once.
    return tuple(tuple(dict.fromkeys((node, partner[node]))) for node in node_of)


def node_bytes(plan: RunPlan, node_of: Sequence[str]) -> dict[str, int]:
    """Return the host memory that snapshots take on each node that has any, at most.

    Args:
        plan: Plan of the run.
        node_of: Name of the node of each rank.
    """
    taken: dict[str, int] = defaultdict(int)
    costs: dict[tuple[int, int, int], SnapshotCost] = {}
    for rank, homes in enumerate(copy_nodes(node_of)):
        # ranks that differ in cp, dp and ep only hold parts of one size
        at = plan.grid.coords(rank)
        kind = at.pp, at.tp, len(homes)
        if kind not in costs:
            costs[kind] = snapshot_cost(plan, rank, num_copies=len(homes))
        cost = costs[kind]
        # the rank's own node holds its buffers, the partner holds the second copy
        taken[node_of[rank]] += cost.buffer_bytes
        taken[homes[-1]] += cost.server_bytes
    return dict(taken)


def memory_faults(
    plan: RunPlan, node_of: Sequence[str], memory_bytes: Mapping[str, int]
) -> list[Fault]:
    """Return the faults of nodes whose whole memory is less than snapshots would take of it.

    Args:
        plan: Plan of the run.
        node_of: Name of the node of each rank.
        memory_bytes: Memory of each node; a node that is missing has enough.
    """
    every = plan.job.elastic.snapshot_every
    if not every:
        return []
    return [
        Fault(
            fact=f"elastic.snapshot_every={every}: snapshots would take {taken / GIB_BYTES:.1f} GiB "
            f"on node {node}",
            rule=f"they must fit into the {memory_bytes[node] / GIB_BYTES:.1f} GiB that Ray has there",
            remedy="use more nodes or parallel.dp, or set elastic.snapshot_every=0",
        )
        for node, taken in sorted(node_bytes(plan, node_of).items())
        if node in memory_bytes and taken > memory_bytes[node]
    ]


def snapshot_cost(plan: RunPlan, rank: int, *, num_copies: int = 2) -> SnapshotCost:
    """Return the bytes of ``rank``'s snapshots; exact except for rows that replicas share unevenly.

    Args:
        plan: Plan of the run.
        rank: Global rank that takes the snapshots.
        num_copies: Number of copies; 1 on a single node.
    """
    share = share_bytes(plan, rank)
    return SnapshotCost(
        share_bytes=share,
        buffer_bytes=share * NUM_GENERATIONS,
        server_bytes=share * NUM_GENERATIONS * (num_copies - 1),
        sent_bytes=share * (num_copies - 1),
    )
