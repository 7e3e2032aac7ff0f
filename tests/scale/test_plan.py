"""Plans and memory checks by kind of rank: what they compute and print does not grow with the world."""

import json
from collections import Counter

import pytest

from raymega.cli.plan import text
from raymega.plan import snapshot_replicas
from raymega.plan.snapshot_replicas import node_bytes, snapshot_cost
from tests.scale.test_start import plan_of

SIZES = (64, 512, 4096)


@pytest.mark.parametrize("snapshots", [0, 1])
def test_plan_as_json_has_a_row_for_each_kind_of_rank(snapshots, capsys):
    lengths = Counter()
    for world_size in (*SIZES, 16384, 98304):
        plan = plan_of(
            world_size, f"elastic.snapshot_every={snapshots}", "elastic.min_workers=grid"
        )
        text.show_plan(plan, as_json=True)
        printed = capsys.readouterr().out
        ranks = json.loads(printed)["ranks"]
        assert sum(each["num_ranks"] for each in ranks) == world_size and len(ranks) <= 8
        lengths[world_size] = len(printed)
    assert max(lengths.values()) < 1.1 * min(lengths.values())


def test_memory_of_nodes_is_computed_once_a_kind_and_is_that_of_every_rank(monkeypatch):
    calls = []
    monkeypatch.setattr(
        snapshot_replicas,
        "snapshot_cost",
        lambda *args, **more: calls.append(args) or snapshot_cost(*args, **more),
    )
    for world_size in SIZES:
        plan = plan_of(world_size, "elastic.snapshot_every=1")
        calls.clear()
        taken = node_bytes(plan, [f"node{rank // 8:05}" for rank in range(world_size)])
        assert len(calls) == 8 and len(taken) == world_size // 8
    # against the cost of each rank, its own and its neighbour's
    costs = [snapshot_cost(plan, rank) for rank in range(64)]
    own, others = sum(c.buffer_bytes for c in costs[8:16]), sum(c.server_bytes for c in costs[:8])
    assert taken["node00001"] == own + others
