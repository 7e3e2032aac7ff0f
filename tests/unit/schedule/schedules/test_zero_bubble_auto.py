"""zb_auto's search: its limit on memory, its bound on work, and that every rank finds the same."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.errors import PlanError
from raymega.schedule import list_scheduling
from raymega.schedule.checker import check
from raymega.schedule.instructions import Op
from raymega.schedule.order import Sizes
from raymega.schedule.schedules import zero_bubble_auto
from raymega.schedule.schedules.zero_bubble_auto import zb_auto
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.stage_placement import Placement
from raymega.schedule.table import make_schedule
from raymega.schedule.transfers import make_program

times = st.floats(0.1, 3.0)
MOST_LOOKS = 2
"""How often a rank looks for work, for each task that is placed: it begins one, or waits for one."""


def _peak(schedule, share):
    change = {Op.FORWARD: 1, Op.BACKWARD_INPUT: share - 1, Op.BACKWARD_WEIGHT: -share}
    return max(accumulate(change[task.op] for task in schedule))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 8), st.integers(1, 12), st.floats(0.05, 1.0),
    times, times, times, st.floats(0, 1.0),
)  # fmt: skip
def test_limit_holds_in_bytes_whatever_the_times(pp, m, limit, share, f, b, w, transfer):
    durations = Durations(forward=f, backward=b + w, weight=w, transfer=transfer)
    sizes = Sizes(
        pp=pp,
        num_micro_batches=m,
        max_in_flight_microbatches=limit,
        wgrad_activation_fraction=share,
        times=durations,
    )
    work = zb_auto(sizes)
    check(make_program(work, Placement(pp=pp)), num_micro_batches=m)
    assert all(_peak(schedule, share) <= limit + 1e-6 for schedule in work)


def test_every_rank_finds_the_same():
    sizes = Sizes(
        pp=4, num_micro_batches=9, max_in_flight_microbatches=6, times=Durations(weight=0.6)
    )
    work = zb_auto(sizes)
    zb_auto.cache_clear()  # as another rank would find it
    assert zb_auto(sizes) == work


def test_search_counts_what_the_simulator_measures():
    """So that the order it keeps is the best one."""
    sizes = Sizes(pp=4, num_micro_batches=9, times=Durations(weight=0.6, transfer=0.1))
    search = zero_bubble_auto._Search(sizes)
    search.try_all_ranks_alike()
    work = [zero_bubble_auto._work(word, 9) for word in search.words]
    found = simulate(make_program(work, Placement(pp=4)), sizes.times).bubble
    assert search._longest == pytest.approx(9 * 3 * (1 + found))


@pytest.mark.parametrize(("pp", "m"), [(4, 9), (32, 128)], ids=["by-orders", "by-tasks"])
def test_work_of_a_search_is_bounded(pp, m, monkeypatch):
    """Counted in orders that are built, tasks that are placed and looks for work, not in seconds."""
    assert zero_bubble_auto.MOST_TASKS <= 1_000_000 and zero_bubble_auto.MOST_ORDERS <= 500
    most_tasks, looks, played, simulated = 100_000, [], [], []

    def count(calls, function):
        return lambda *words: (calls.append(0), function(*words))[1]

    monkeypatch.setattr(zero_bubble_auto, "MOST_TASKS", most_tasks)
    monkeypatch.setattr(list_scheduling._Game, "act", count(looks, list_scheduling._Game.act))
    monkeypatch.setattr(zero_bubble_auto, "play", count(played, zero_bubble_auto.play))
    monkeypatch.setattr(zero_bubble_auto, "simulate", count(simulated, zero_bubble_auto.simulate))
    times = Durations(weight=0.7, transfer=0.05)
    zb_auto.__wrapped__(Sizes(pp=pp, num_micro_batches=m, times=times))
    num_tasks = len(played) * 3 * pp * m
    assert 0 < len(played) <= zero_bubble_auto.MOST_ORDERS and len(simulated) <= 2
    assert num_tasks <= most_tasks + 3 * pp * m, "the last order may go beyond"
    assert len(looks) <= MOST_LOOKS * num_tasks


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_share_that_is_none_is_refused(share):
    with pytest.raises(PlanError, match=r"schedule\.wgrad_activation_fraction"):
        make_schedule("zb_auto", Sizes(pp=2, num_micro_batches=2, wgrad_activation_fraction=share))


def test_order_that_was_found_is_found_no_second_time(monkeypatch):
    """A step with as many micro-batches as one before waits for no search."""
    sizes = Sizes(pp=4, num_micro_batches=8, times=Durations(weight=0.7))
    work = zb_auto(sizes)
    monkeypatch.setattr(zero_bubble_auto, "_Search", lambda _: pytest.fail("searched again"))
    assert zb_auto(Sizes(pp=4, num_micro_batches=8, times=Durations(weight=0.7))) is work
