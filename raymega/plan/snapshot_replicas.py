"""Where copies of a rank's state are kept in memory, and what that costs.

A snapshot of a rank's share lies twice: on its own node and in its partner's keeper, the next
node round. So whichever node is lost, the other copy lives. Starting and asking keepers is
orchestrate's.
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
"""The newest whole snapshot and the one that is being written, on each of the nodes that keep a copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotCost:
    """What one rank's snapshots cost its node and its partner.

    Attributes:
        share_bytes: What the rank writes of one snapshot.
        buffer_bytes: Host memory of its node, at most: what it copies to, which its keeper has a view of.
        keeper_bytes: Host memory of the partner's keeper, at most.
        sent_bytes: What leaves the rank's node for one snapshot.
    """

    share_bytes: int
    buffer_bytes: int
    keeper_bytes: int
    sent_bytes: int


def partners(nodes: Sequence[str]) -> dict[str, str]:
    """The partner of each node that occurs in ``nodes``: the next one by name, round.

    Each node is the partner of one other, so that none keeps more than two nodes' copies. A node
    that is alone is its own, and then there is one copy.
    """
    ring = sorted(set(nodes))
    return dict(zip(ring, (*ring[1:], *ring[:1]), strict=True))


def copy_nodes(node_of: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """By rank the nodes that keep its share: its own and the partner.

    Args:
        node_of: The node of each rank.
    """
    partner = partners(node_of)
    return tuple(tuple(dict.fromkeys((node, partner[node]))) for node in node_of)


def node_bytes(plan: RunPlan, node_of: Sequence[str]) -> dict[str, int]:
    """Host memory that snapshots take on each node that has any, at most.

    Args:
        plan: Of the run.
        node_of: The node of each rank.
    """
    taken: dict[str, int] = defaultdict(int)
    for rank, homes in enumerate(copy_nodes(node_of)):
        cost = snapshot_cost(plan, rank, num_copies=len(homes))
        taken[node_of[rank]] += cost.buffer_bytes
        taken[homes[-1]] += cost.keeper_bytes
    return dict(taken)


def memory_faults(
    plan: RunPlan, node_of: Sequence[str], memory_bytes: Mapping[str, int]
) -> list[Fault]:
    """Nodes whose whole memory is less than snapshots would take of it.

    Args:
        plan: Of the run.
        node_of: The node of each rank.
        memory_bytes: Of each node; one that is missing has enough.
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
    """Bytes of ``rank``'s snapshots; exact but for rows that replicas share unevenly.

    Args:
        plan: Of the run.
        rank: Whose.
        num_copies: 1 on a single node.
    """
    share = share_bytes(plan, rank)
    return SnapshotCost(
        share_bytes=share,
        buffer_bytes=share * NUM_GENERATIONS,
        keeper_bytes=share * NUM_GENERATIONS * (num_copies - 1),
        sent_bytes=share * (num_copies - 1),
    )
