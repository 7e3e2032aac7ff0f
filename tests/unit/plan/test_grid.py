"""Rank arithmetic: bijective, orthogonal, in the order asked for."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymega.config.schema import ParallelSection
from raymega.plan.grid import AXES, Grid, grid_faults, world_fault

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


def test_bad_order_and_unbuilt_axes_are_both_reported():
    faults = grid_faults(ParallelSection(ep=2, order="tp-dp-pp"))
    assert [str(f).split("=")[0] for f in faults] == ["parallel.ep", "parallel.order"]


def test_world_fault_proposes_the_degree_that_fits():
    fault = world_fault(ParallelSection(tp=2, pp=2, dp=1), 8)
    assert fault is not None and "parallel.dp=2" in fault.remedy
    assert world_fault(ParallelSection(tp=2, pp=2, dp=2), 8) is None
