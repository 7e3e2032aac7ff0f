"""Where copies lie: whichever node is lost, every rank's share lives on another."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymega.plan.memory.state_bytes import rank_state
from raymega.plan.snapshot_replicas import (
    copy_nodes,
    memory_faults,
    node_bytes,
    partners,
    snapshot_cost,
)
from tests.support.jobs import make_test_plan

NODES = st.lists(st.sampled_from([f"node{n}" for n in range(9)]), min_size=1, max_size=40)


@given(node_of=NODES)
def test_any_one_node_lost_leaves_every_rank_a_copy(node_of):
    homes = copy_nodes(node_of)
    for lost in set(node_of):
        for rank, nodes in enumerate(homes):
            assert nodes[0] == node_of[rank]
            survivors = set(nodes) - {lost}
            assert survivors or len(set(node_of)) == 1


@given(node_of=NODES)
def test_no_node_keeps_more_than_its_own_and_one_neighbours(node_of):
    keeps = {node: set() for node in node_of}
    for rank, nodes in enumerate(copy_nodes(node_of)):
        for node in nodes:
            keeps[node].add(node_of[rank])
    assert max(map(len, keeps.values())) <= 2
    assert Counter(partners(node_of).values()) == Counter(set(node_of))


def test_places_do_not_depend_on_the_order_of_nodes():
    assert partners(["c", "a", "b", "a"]) == {"a": "b", "b": "c", "c": "a"}
    assert partners(["only"]) == {"only": "only"}
    assert copy_nodes(["only", "only"]) == (("only",), ("only",))


@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_cost_counts_masters_and_moments_of_the_share(sharding):
    plan = make_test_plan(
        "parallel.pp=1",
        "parallel.dp=2",
        f"parallel.sharding={sharding}",
        "precision.dtype=bfloat16",
    )
    cost = snapshot_cost(plan, 0)
    half = -(-rank_state(plan.job, plan.stages, plan.grid, tp_rank=0).num_parameters // 2)
    assert cost.share_bytes == half * 3 * 4, "a float32 master and two moments, half of each"
    assert cost.sent_bytes == cost.share_bytes
    assert cost.buffer_bytes == cost.server_bytes == 2 * cost.share_bytes
    assert cost.buffer_bytes + cost.server_bytes == 4 * cost.share_bytes
    alone = snapshot_cost(plan, 0, num_copies=1)
    assert (alone.sent_bytes, alone.server_bytes) == (0, 0)
    assert alone.buffer_bytes + alone.server_bytes == 2 * cost.share_bytes


def test_context_parallel_ranks_share_a_snapshot_as_data_parallel_ones_do():
    shares = [
        snapshot_cost(make_test_plan("parallel.pp=1", axis), 0).share_bytes
        for axis in ("parallel.cp=2", "parallel.dp=2")
    ]
    assert shares[0] == shares[1]


def test_node_takes_two_generations_of_its_own_ranks_and_of_those_of_the_node_before():
    plan = make_test_plan("parallel.pp=1", "parallel.dp=3", "elastic.snapshot_every=1")
    share = snapshot_cost(plan, 0).share_bytes
    taken = node_bytes(plan, ("a", "a", "b"))
    assert taken == {"a": (4 + 2) * share, "b": (2 + 4) * share}
    assert node_bytes(plan, ("a", "a", "a")) == {"a": 6 * share}


def test_node_without_room_for_snapshots_is_refused_by_name():
    plan = make_test_plan("parallel.pp=1", "parallel.dp=2", "elastic.snapshot_every=1")
    need = node_bytes(plan, ("a", "b"))["a"]
    enough = {"a": need, "b": need}
    assert memory_faults(plan, ("a", "b"), enough) == memory_faults(plan, ("a", "b"), {}) == []
    (fault,) = memory_faults(plan, ("a", "b"), enough | {"b": need - 1})
    assert "elastic.snapshot_every=1" in fault.fact and "on node b" in fault.fact
    off = make_test_plan("parallel.pp=1", "parallel.dp=2")
    assert memory_faults(off, ("a", "b"), {"a": 0}) == []
