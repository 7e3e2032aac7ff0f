from itertools import combinations, islice
from statistics import mean

from raymega.chaos.fault_schedule import DRAWN, covering_pairs, draw_faults, draw_victims
from raymega.chaos.faults import KINDS, STEP_PHASES, legal_cells


def test_blows_are_the_same_for_a_seed_and_have_the_mean_time_that_was_asked_for():
    first, again = (
        list(islice(draw_faults(mtbf_s=30, seed=7, world_size=4), 2000)) for _ in range(2)
    )
    assert first == again
    assert abs(mean(scheduled.after_s for scheduled in first) - 30) < 2
    assert {scheduled.kind for scheduled in first} == set(DRAWN)
    assert {scheduled.rank for scheduled in first} == {0, 1, 2, 3}
    assert first != list(islice(draw_faults(mtbf_s=30, seed=8, world_size=4), 2000))


def test_victims_are_ranks():
    assert set(draw_victims(100, seed=1, world_size=3)) == {0, 1, 2}


def values_of(run):
    return (run[0].kind, run[0].phase, run[-1].kind, run[-1].phase)


def test_pairs_cover_far_more_than_chance_and_each_kind_twice():
    runs = covering_pairs(seed=2026, size=40)
    covered = {pair for run in runs for pair in combinations(enumerate(values_of(run)), 2)}
    assert len(runs) == 40 and len(covered) > 0.8 * 40 * 6
    for place in (0, -1):
        assert {run[place].kind for run in runs} == {kind for kind, _ in legal_cells()}


def test_second_fault_of_a_start_has_an_attempt_that_begins():
    for run in covering_pairs(seed=2026, size=40):
        if len(run) == 3:
            assert run[1].kind == "kill-worker" and not KINDS[run[0].kind].ends_attempt
        else:
            assert KINDS[run[0].kind].ends_attempt or run[1].phase in STEP_PHASES
