import random
from dataclasses import replace

import pytest

from raymega.errors import CapacityError, InternalError
from raymega.messages import NodeSlots
from raymega.orchestrate.core.rank_placement import (
    DOMAIN_LABEL,
    WorkerLocation,
    assign_ranks,
    choose_ranks,
    keep_ranks,
    place_ranks,
)
from raymega.plan.grid import Grid

GRIDS = [Grid(tp=2, pp=2, dp=2), Grid(tp=4, dp=2), Grid(tp=2, dp=2, order="dp-tp-cp-ep-pp")]


def nodes(*slots):
    return [NodeSlots(node_id=f"n{i}", address="", num_slots=n) for i, n in enumerate(slots)]


def locations(*node_ids):
    return [WorkerLocation(node_id=n, address="", pid=i) for i, n in enumerate(node_ids)]


def at(node_id, gpu):
    return WorkerLocation(node_id=node_id, address="", pid=gpu, gpus=(str(gpu),))


def ranks(assigned_ranks):
    return [assigned.rank for assigned in assigned_ranks]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.describe()}-{grid.order[:2]}")
def test_place_ranks_keeps_each_tp_group_on_one_node(grid):
    placed = place_ranks(nodes(5, 5, 4), grid, block=grid.tp)
    assert len(placed) == grid.world_size
    for group in grid.groups("tp"):
        assert len({placed[rank] for rank in group}) == 1


def test_place_ranks_refuses_when_tp_groups_do_not_fit_whole():
    with pytest.raises(CapacityError) as caught:
        place_ranks(nodes(3, 3, 1), Grid(tp=2, dp=3), block=2)
    assert "3 nodes with 3, 3, 1 worker slots" in str(caught.value)
    assert "6 workers in tp groups of 2, each whole on a node; there is room for 4" in str(
        caught.value
    )


def test_place_ranks_uses_every_slot_when_tp_may_cross_nodes():
    placed = place_ranks(nodes(3, 3), Grid(tp=2, dp=3), block=1)
    assert placed == ("n0", "n0", "n0", "n1", "n1", "n1")


def test_place_ranks_names_an_empty_cluster():
    with pytest.raises(CapacityError, match="0 nodes with no worker slots"):
        place_ranks([], Grid(), block=1)


def test_place_ranks_fills_the_largest_node_first():
    placed = place_ranks(nodes(1, 4), Grid(dp=4), block=1)
    assert set(placed) == {"n1"}


def test_place_ranks_fills_the_roomiest_domain_first():
    rack = [replace(node, labels={DOMAIN_LABEL: name})
            for node, name in zip(nodes(4, 2, 3), ("one", "two", "two"), strict=True)]  # fmt: skip
    placed = place_ranks(rack, Grid(dp=5), block=1)
    assert set(placed) == {"n1", "n2"}


def test_assign_seats_does_not_depend_on_the_order_of_the_workers():
    grid, at = Grid(tp=2, pp=2), locations("b", "a", "b", "a")
    assigned_ranks = assign_ranks(at, grid, block=grid.tp)
    assert ranks(assigned_ranks) == [2, 0, 3, 1]
    assert [assigned.local_rank for assigned in assigned_ranks] == [0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.describe()}-{grid.order[:2]}")
def test_assign_seats_gives_each_rank_once_and_tp_groups_one_node(grid, seed):
    homes = [f"n{i // 4}" for i in range(grid.world_size)]
    random.Random(seed).shuffle(homes)
    assigned_ranks = assign_ranks(locations(*homes), grid, block=grid.tp)
    home_of = {assigned.rank: home for assigned, home in zip(assigned_ranks, homes, strict=True)}
    assert sorted(home_of) == list(range(grid.world_size))
    for group in grid.groups("tp"):
        assert len({home_of[rank] for rank in group}) == 1


def test_assign_seats_follows_the_gpus_of_a_node_as_numbers():
    at = [
        WorkerLocation(node_id="n", address="", pid=i, gpus=(g,))
        for i, g in enumerate(["10", "2", "0"])
    ]
    assert ranks(assign_ranks(at, Grid(dp=3), block=1)) == [2, 1, 0]


def test_assign_seats_refuses_a_torn_tp_group():
    with pytest.raises(InternalError, match="holds 3 workers"):
        assign_ranks(locations("a", "a", "a", "b"), Grid(tp=2, dp=2), block=2)


def test_ranks_are_kept_when_a_lost_nodes_workers_come_back_elsewhere():
    grid = Grid(tp=2, dp=2)
    locations = [at("b", 0), at("b", 1), at("a", 0), at("a", 1)]
    assigned_ranks = keep_ranks(locations, (0, 1, 2, 3), grid, block=grid.tp)
    assert [assigned.rank for assigned in assigned_ranks] == [0, 1, 2, 3], "not by the nodes' names"
    assert [assigned.local_rank for assigned in assigned_ranks] == [0, 1, 0, 1]


def test_ranks_are_not_kept_against_the_order_of_gpus_or_across_nodes():
    grid = Grid(tp=2, dp=2)
    swapped = [at("a", 1), at("a", 0), at("b", 0), at("b", 1)]
    assert keep_ranks(swapped, (0, 1, 2, 3), grid, block=grid.tp) is None
    torn = [at("a", 0), at("b", 0), at("a", 1), at("b", 1)]
    assert keep_ranks(torn, (0, 1, 2, 3), grid, block=grid.tp) is None
    assert keep_ranks(torn, (0, 1, 2, 3), grid, block=1) is not None


def choose(where, ranks, grid, *, is_free=False):
    return choose_ranks(where, ranks, grid, block=1 if is_free else grid.tp)


def test_choose_ranks_gives_a_lost_rank_to_a_free_process_of_its_node():
    where = locations("a", "a", "a", "b", "b")
    assert choose(where, [0, 1, -1, 2, 3], Grid(tp=2, dp=2)) == (0, 1, -1, 2, 3)
    where = locations("a", "a", "b", "b")
    assert choose(where, [0, -1, 2, 3], Grid(tp=2, dp=2)) == (0, 1, 2, 3)


def test_choose_ranks_moves_a_whole_tp_group_to_where_there_is_room():
    where = locations("a", "b", "b", "c", "c")
    assert choose(where, [1, 2, 3, -1, -1], Grid(tp=2, dp=2)) == (-1, 2, 3, 0, 1)
    assert choose(where[:4], [1, 2, 3, -1], Grid(tp=2, dp=2)) is None
    assert choose(where[:4], [1, 2, 3, -1], Grid(tp=2, dp=2), is_free=True) == (1, 2, 3, 0)


def test_choose_ranks_packs_neighbours_when_nobody_has_a_rank():
    where = locations("b", "a", "b", "a", "b", "a", "b")
    assert choose(where, [-1] * 7, Grid(tp=2, dp=2)) == (0, -1, 1, -1, 2, -1, 3)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.describe()}-{grid.order[:2]}")
def test_choose_ranks_keeps_groups_whole_and_survivors_seated(grid):
    draw = random.Random(5)
    for _ in range(100):
        where = locations(*(f"n{draw.randrange(3)}" for _ in range(14)))
        first = choose(where, [-1] * 14, grid)
        if first is None:
            continue
        lost = draw.randrange(14)
        left = [location for index, location in enumerate(where) if index != lost]
        homes = [rank for index, rank in enumerate(first) if index != lost]
        second = choose(left, homes, grid)
        if second is None:
            continue
        node_of = {
            rank: location.node_id for rank, location in zip(second, left, strict=True) if rank >= 0
        }
        assert sorted(node_of) == list(range(grid.world_size))
        groups = list(grid.groups("tp"))
        assert all(len({node_of[rank] for rank in group}) == 1 for group in groups)
        moved = {a for a, b in zip(homes, second, strict=True) if a != b and a >= 0}
        assert not moved or any(moved < set(group) for group in groups)


def in_domains(**domain_of):
    return [
        WorkerLocation(node_id=node, address="", pid=pid, domain=domain)
        for node, domain in domain_of.items()
        for pid in range(2)
    ]


def test_neighbours_on_the_grid_share_a_domain():
    where = in_domains(a="rack2", b="rack1", c="rack2", d="rack1")
    grid = Grid(tp=2, dp=4)
    assigned_ranks = assign_ranks(where, grid, block=grid.tp)
    chosen = choose(where, [-1] * 8, grid)
    for ranks_of in ([assigned.rank for assigned in assigned_ranks], chosen):
        domain_of = {rank: location.domain for rank, location in zip(ranks_of, where, strict=True)}
        assert [len({domain_of[rank] for rank in half}) for half in (range(4), range(4, 8))] == [
            1,
            1,
        ]


def test_tp_group_that_may_span_nodes_stays_in_a_domain():
    where = in_domains(a="rack2", b="rack1", c="rack2", d="rack1")
    assigned_ranks = assign_ranks(where, Grid(tp=4, dp=2), block=1)
    for first in (0, 4):
        group = [location.domain for location, assigned in zip(where, assigned_ranks, strict=True)
                 if first <= assigned.rank < first + 4]  # fmt: skip
        assert len(set(group)) == 1


def _choose_by_the_rule(locations, ranks, grid, *, block):
    """The rule of choose_ranks, word for word: each group looks at every node."""
    holder = {rank: index for index, rank in enumerate(ranks) if 0 <= rank < grid.world_size}
    free = {}
    for index, location in enumerate(locations):
        free.setdefault(location.node_id, [])
        if ranks[index] not in range(grid.world_size):
            free[location.node_id].append(index)
    domains = {location.node_id: location.domain for location in locations}
    groups = list(grid.groups("tp")) if block > 1 else [(r,) for r in range(grid.world_size)]
    moving = []
    for group in groups:
        nodes = {locations[holder[rank]].node_id for rank in group if rank in holder}
        lacking = [rank for rank in group if rank not in holder]
        if len(nodes) == 1 and len(free[min(nodes)]) >= len(lacking):
            holder |= {rank: free[min(nodes)].pop(0) for rank in lacking}
        else:
            moving.append(group)
    for group in moving:
        for index in (holder.pop(rank) for rank in group if rank in holder):
            free[locations[index].node_id].append(index)
    for group in moving:
        room = [node for node in free if len(free[node]) >= len(group)]
        if not room:
            return None
        last = locations[holder[group[0] - 1]].node_id if group[0] - 1 in holder else ""
        near = domains.get(last, "")
        node = min(room, key=lambda n: (n != last, domains[n] != near, -len(free[n]), n))
        holder |= {rank: free[node].pop(0) for rank in group}
    rank_of = {index: rank for rank, index in holder.items()}
    return tuple(rank_of.get(index, -1) for index in range(len(locations)))


@pytest.mark.parametrize("seed", range(40))
def test_groups_that_move_take_the_nodes_of_the_rule(seed):
    """Any mix of lost, kept and spare processes on nodes of several domains."""
    draw = random.Random(seed)
    grid = Grid(tp=draw.choice((1, 2, 4)), dp=draw.choice((2, 5, 8)))
    block = draw.choice((1, grid.tp))
    sizes = [draw.randint(1, 4) * block for _ in range(draw.randint(2, 14))]
    locations = [
        WorkerLocation(
            node_id=f"n{node}", address="", pid=0, domain=f"d{node % 3}" if seed % 2 else ""
        )
        for node, size in enumerate(sizes)
        for _ in range(size)
    ]
    kept = draw.sample(range(grid.world_size), draw.randint(0, grid.world_size))
    ranks = [*kept, *[-1] * len(locations)][: len(locations)]
    draw.shuffle(ranks)
    found = choose_ranks(locations, ranks, grid, block=block)
    if len(locations) < grid.world_size:
        assert found is None
    else:
        assert found == _choose_by_the_rule(locations, ranks, grid, block=block)
