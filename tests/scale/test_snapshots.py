"""Snapshots of a 70B model at 512 to 16,384 ranks: what the driver is sent, and what a rank reads.

Parts, questions and answers are real; servers are stores in this process. A rank's part is made when it is
asked for, so 16,384 of them need no memory.
"""

import json

import pytest

from raymega.checkpoint.format.keys import folder_of, part_file, rank_of
from raymega.checkpoint.snapshots.copies import SnapshotCopies
from raymega.checkpoint.snapshots.part import SnapshotPart
from raymega.checkpoint.snapshots.queries import QUESTIONS, HeldShares
from raymega.checkpoint.snapshots.snapshot import find_snapshot
from raymega.plan.grid import Grid
from raymega.plan.snapshot_replicas import copy_nodes
from tests.scale.checkpoints import PP, STATE, TP, rank_blocks, shard_of
from tests.scale.fake_ray import GPUS_A_NODE
from tests.support.memory_store import MemoryStore

MB = 10**6
DRIVER_BYTES = {512: 1 * MB, 4_096: 1 * MB, 16_384: 4 * MB}
RANK_BYTES = 256_000  # about its own part
STEP = 100


class Server(MemoryStore):
    """A node's server: asked, it finds its ranks' parts, and counts bytes of questions and answers."""

    def __init__(self, ranks, grid):
        super().__init__()
        self.ranks, self.grid, self.num_bytes, self.num_asked = ranks, grid, 0, 0

    def ask(self, question, about):
        answer = QUESTIONS[question](self, about)
        self.num_bytes += len(json.dumps(about)) + len(json.dumps(answer))
        self.num_asked += 1
        return answer

    def list(self, prefix):
        keys = (folder_of(STEP) + part_file(attempt=1, rank=rank) for rank in self.ranks)
        return (key for key in keys if key.startswith(prefix))

    def get(self, key, **_):
        shard = shard_of(self.grid.world_size, rank_of(key))
        part = SnapshotPart(
            attempt=1, grid=self.grid.degrees(), world_size=self.grid.world_size, shard=shard
        )
        return part.to_json()

    def size(self, _):
        return 1


class Quick(Server):
    """Knows what it holds without parsing 27 kB for each rank, so that the driver's side can be counted."""

    def ask(self, question, about):
        if question != "held":
            return super().ask(question, about)
        runs = [[each, each] for each in sorted(self.ranks)]  # ranges, at their longest
        answer = [
            {
                "attempt": 1, "step": STEP, "world_size": self.grid.world_size,
                "grid": self.grid.degrees(), "state": STATE, "ranks": runs,
            }
        ]  # fmt: skip
        assert set(answer[0]) == set(HeldShares.__dataclass_fields__)
        self.num_bytes += len(json.dumps(answer))
        return answer


def servers_of(world_size, lost=()):
    """Return the grid, the servers that are left, by node, and the node of each rank."""
    grid = Grid(tp=TP, pp=PP, dp=world_size // (TP * PP))
    nodes = [f"10.0.0.{rank // GPUS_A_NODE:05}:50051" for rank in range(world_size)]
    held = {node: set() for node in nodes}
    for rank, homes in enumerate(copy_nodes(nodes)):
        for node in homes:
            held[node].add(rank)
    left = {node: Quick(ranks, grid) for node, ranks in held.items() if node not in lost}
    return grid, left, nodes


@pytest.mark.parametrize("world_size", [512, 4_096, pytest.param(16_384, marks=pytest.mark.wide)])
def test_lost_node_comes_back_from_its_partner_and_the_driver_hears_a_line_a_node(world_size):
    lost = f"10.0.0.{3:05}:50051"
    grid, servers, nodes = servers_of(world_size, lost={lost})
    snapshot = find_snapshot(servers, job={}, now="")
    driver_bytes = sum(server.num_bytes for server in servers.values())
    assert snapshot is not None and driver_bytes < DRIVER_BYTES[world_size]
    # a rank of the lost node, on the same grid: one question, about its own share
    rank = nodes.index(lost)
    shard = shard_of(world_size, rank)
    for server in servers.values():
        server.num_bytes = server.num_asked = 0
    copies = SnapshotCopies(servers, snapshot.holders, first=rank)
    manifest = copies.read_blocks(
        snapshot.manifest.key, rank_blocks(shard.boxes), rank=rank, grid=grid
    )
    assert set(manifest.boxes) == set(shard.boxes)
    assert sum(server.num_asked for server in servers.values()) == 1
    rank_bytes = sum(server.num_bytes for server in servers.values())
    assert rank_bytes < RANK_BYTES
    print(world_size, driver_bytes, rank_bytes)


def test_server_tells_which_shares_it_holds():
    grid, *_ = servers_of(64)
    server = Server({0, 1, 2, 7, 9}, grid)
    (held,) = QUESTIONS["held"](server, None)
    assert held["ranks"] == [[0, 2], [7, 7], [9, 9]] and held["world_size"] == 64
