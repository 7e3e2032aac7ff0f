"""Rank arithmetic: bijective, orthogonal, in the order asked for."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymega.plan.grid import AXES, Grid

degrees = st.integers(1, 4)
orders = st.sampled_from(["-".join(order) for order in permutations(AXES)])


@given(tp=degrees, cp=degrees, dp=degrees, pp=degrees, order=orders)
def test_coords_and_rank_are_inverse(tp, cp, dp, pp, order):
    grid = Grid(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    assert [grid.rank(grid.coords(rank)) for rank in range(grid.world_size)] == list(
        range(grid.world_size)
    )


@given(tp=degrees, cp=degrees, dp=degrees, pp=degrees, order=orders)
def test_groups_of_each_axis_partition_the_world(tp, cp, dp, pp, order):
    grid = Grid(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    for axes in ("tp", "dp", "pp", "cp", ("tp", "pp"), ("dp", "cp")):
        members = sorted(rank for group in grid.groups(axes) for rank in group)
        assert members == list(range(grid.world_size))


def test_group_lists_match_the_published_example():
    grid = Grid(tp=2, cp=2, dp=2)
    assert list(grid.groups("tp")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(grid.groups("cp")) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(grid.groups("dp")) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_group_of_two_axes_varies_the_first_named_fastest():
    grid = Grid(tp=2, pp=2, dp=2)
    assert grid.group(("tp", "pp"), 0) == (0, 1, 4, 5)
    assert grid.group(("pp", "tp"), 0) == (0, 4, 1, 5)


def test_rank_outside_the_world_is_an_error():
    with pytest.raises(IndexError, match="8"):
        Grid(tp=2, pp=2, dp=2).coords(8)


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        (Grid(), "one-rank"),
        (Grid(tp=2, pp=2, dp=2), "tp2-pp2-dp2"),
        (Grid(tp=11, dp=1, pp=21), "tp11-pp21"),
    ],
)
def test_describe_is_short(grid, text):
    assert grid.describe() == text


@st.composite
def folded(draw):
    """A grid whose experts lie on any legal etp * ep of a stage's ranks."""
    shape = {axis: draw(st.integers(1, 4)) for axis in ("tp", "cp", "dp", "pp")}
    ranks = shape["tp"] * shape["cp"] * shape["dp"]
    etp = draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
    rest = ranks // etp
    ep = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
    return Grid(**shape, ep=ep, etp=etp, order=draw(orders))


@given(grid=folded())
def test_experts_view_is_a_bijection_that_keeps_the_pipeline(grid):
    assert grid.etp * grid.ep * grid.edp * grid.pp == grid.world_size
    for rank in range(grid.world_size):
        there = grid.expert_coords(rank)
        assert grid.expert_rank(there) == rank
        assert there.pp == grid.coords(rank).pp


@given(grid=folded())
def test_groups_of_experts_partition_each_stage(grid):
    for axes in ("etp", "ep", "edp", ("etp", "ep"), ("etp", "ep", "edp")):
        groups = {frozenset(grid.expert_group(axes, rank)) for rank in range(grid.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
        for group in groups:
            assert len({grid.coords(rank).pp for rank in group}) == 1
    stage = grid.expert_group(("etp", "ep", "edp"), 0)
    assert set(stage) == set(grid.group(("tp", "cp", "dp"), 0))


def test_experts_are_folded_onto_attention_as_published():
    """Attention tp4 cp2 with experts ep8; and etp first, then ep and edp as ep and dp are ordered."""
    grid = Grid(tp=4, cp=2, ep=8)
    assert grid.expert_group("ep", 3) == tuple(range(8)) and grid.edp == 1
    grid = Grid(tp=2, cp=2, dp=2, etp=2, ep=2)
    assert grid.expert_group("etp", 0) == (0, 1)
    assert grid.expert_group("ep", 0) == (0, 2) and grid.expert_group("edp", 0) == (0, 4)
    late = Grid(tp=2, cp=2, dp=2, etp=2, ep=2, order="tp-cp-dp-ep-pp")
    assert late.expert_group("ep", 0) == (0, 4) and late.expert_group("edp", 0) == (0, 2)


@given(grid=folded())
def test_ranks_hold_every_expert_once_in_each_replica(grid):
    held = {}
    for rank in range(grid.world_size):
        here, place = grid.expert_coords(rank), grid.expert_place(rank)
        held.setdefault((here.pp, here.edp), set()).add((place.ep_rank, place.etp_rank))
    assert len(held) == grid.pp * grid.edp
    assert all(len(parts) == grid.ep * grid.etp for parts in held.values())


def test_rank_is_described_by_the_axes_that_vary_and_pipelines_stay_together():
    grid = Grid(tp=2, pp=2, dp=2)
    assert grid.describe_rank(5) == "dp0 tp1 pp1"
    assert Grid().describe_rank(0) == "rank 0"
    told = [grid.describe_rank(rank) for rank in grid.by_pipeline(range(8))]
    assert told[:4] == ["dp0 tp0 pp0", "dp0 tp0 pp1", "dp0 tp1 pp0", "dp0 tp1 pp1"]
