import random
from statistics import median

import pytest

from raymega.events import ExpertLoads
from raymega.messages import RankTimeline
from raymega.orchestrate.driver.rank_reports import RankCollector, RankReports, Stragglers, ratios
from raymega.plan.grid import Grid
from tests.support.jobs import layout_overrides, make_test_plan

GRID = Grid(dp=4, pp=2)
EVEN = {rank: 1.0 if rank < 4 else 3.0 for rank in range(8)}


def test_add_hands_over_when_the_last_rank_has_come():
    gather = RankCollector(2)
    assert gather.add(rank=1, step=5, value="b") == {}
    assert gather.add(rank=1, step=6, value="d") == {}
    assert gather.add(rank=0, step=5, value="a") == {0: "a", 1: "b"}
    assert gather.add(rank=0, step=6, value="c") == {0: "c", 1: "d"}
    assert gather.add(rank=0, step=5, value="e") == {}


def test_timelines_come_on_one_clock_with_the_schedules_own_bubble():
    """Rank 1 says that it had the activation before rank 0 sent it."""
    plan = make_test_plan(*layout_overrides("pp2"))
    rows = [
        (
            ("forward", 0, 0, 0.0, 1.0),
            ("send_forward", 0, 0, 1.0, 1.1),
            ("recv_backward", 0, 0, 1.1, 5.0),
            ("backward", 0, 0, 5.0, 7.0),
        ),
        (
            ("recv_forward", 0, 0, 0.0, 0.5),
            ("forward", 0, 0, 0.5, 1.5),
            ("backward", 0, 0, 1.5, 3.5),
            ("send_backward", 0, 0, 3.5, 3.6),
        ),
    ]
    reports = RankReports(plan)
    recorded = [RankTimeline(rank=rank, step=3, events=row) for rank, row in enumerate(rows)]
    assert reports.add(recorded[1]) == []
    (event,) = reports.add(recorded[0])
    assert event.events[0] == rows[0]
    assert event.events[1][0] == pytest.approx((*rows[1][0][:3], 0.5, 1.0))
    assert event.metrics["run/simulated_bubble"] == pytest.approx(1.0)
    assert {(t.sender, t.receiver) for t in event.transfers} == {(0, 1), (1, 0)}


def test_a_timeline_lists_each_group_once_however_many_ranks_it_has(monkeypatch):
    """Each rank listed its whole group of replicas: 14 s of the driver at 4,096 ranks, while it hears no rank."""
    plan = make_test_plan(*layout_overrides("dp8"))
    listed, group = [], Grid.group
    monkeypatch.setattr(Grid, "group", lambda *args: (listed.append(args), group(*args))[1])
    reports = RankReports(plan)
    rows = [RankTimeline(rank=rank, step=1, events=()) for rank in range(8)]
    (event,) = [event for row in rows for event in reports.add(row)]
    assert len(event.events) == 8
    # eight pipelines of one rank, one group of replicas
    assert len(listed) == 8 + 1


def test_a_layer_whose_routing_collapses_is_told_once_until_it_has_recovered():
    reports = RankReports(make_test_plan(*layout_overrides("pp2")))
    even, piled = (100.0,) * 4, (390.0, 5.0, 5.0, 0.0)
    told = []
    for step, tokens in enumerate((even, piled, piled, even, piled)):
        report = ExpertLoads(step=step, tokens={0: even, 5: tokens})
        _, *collapsed = reports.add(report)
        told += [(event.step, event.layer, event.experts) for event in collapsed]
    assert told == [(1, 5, (1, 2, 3)), (4, 5, (1, 2, 3))]


def test_stages_are_compared_with_themselves():
    assert dict(ratios(EVEN, GRID)) == dict.fromkeys(range(8), 1.0)
    assert dict(ratios({0: 1.0, 1: 2.0}, Grid(pp=2))) == {}, (
        "a rank alone has nobody to be held against"
    )
    assert dict(ratios({0: 1.0, 1: 3.0}, Grid(dp=2)))[1] == 3.0


def test_slow_rank_is_told_of_once_after_two_looks_and_again_after_it_had_recovered():
    stragglers = Stragglers(ratio=1.5)
    slow = EVEN | {5: 6.0}
    told = [
        stragglers.observe(dict(ratios(work, GRID)))
        for work in (slow, slow, slow, EVEN, slow, slow)
    ]
    assert told == [[], [(5, 2.0)], [], [], [], [(5, 2.0)]]


def test_passing_disturbance_and_a_job_that_does_not_ask_tell_nothing():
    stragglers = Stragglers(ratio=1.5)
    assert [
        stragglers.observe(dict(ratios(w, GRID))) for w in (EVEN | {1: 9.0}, EVEN | {2: 9.0}, EVEN)
    ] == [[], [], []]
    never = Stragglers(ratio=0.0)
    assert [never.observe(dict(ratios(EVEN | {1: 9.0}, GRID))) for _ in range(3)] == [[], [], []]


@pytest.mark.parametrize("seed", range(20))
def test_ratio_is_that_to_the_median_of_the_others_of_the_stage(seed):
    """Against the definition, which sorts all others anew for each rank."""
    draw = random.Random(seed)
    grid = Grid(tp=draw.choice((1, 2)), dp=draw.randint(1, 5), pp=draw.choice((1, 2)))
    ranks = draw.sample(range(grid.world_size), draw.randint(1, grid.world_size))
    work_s = {rank: draw.choice((0.0, 1.0, 2.0, draw.random())) for rank in ranks}
    expected = {}
    for rank, own in work_s.items():
        stage = grid.coords(rank).pp
        others = [s for r, s in work_s.items() if r != rank and grid.coords(r).pp == stage]
        if others and median(others) > 0:
            expected[rank] = own / median(others)
    assert dict(ratios(work_s, grid)) == pytest.approx(expected)
