from raymega.orchestrate.driver.straggler_detector import Stragglers, ratios
from raymega.plan.grid import Grid

GRID = Grid(dp=4, pp=2)
EVEN = {rank: 1.0 if rank < 4 else 3.0 for rank in range(8)}


def test_stages_are_compared_with_themselves():
    assert dict(ratios(EVEN, GRID)) == dict.fromkeys(range(8), 1.0)
    assert dict(ratios({0: 1.0, 1: 2.0}, Grid(pp=2))) == {}, (
        "a rank alone has nobody to be held against"
    )
    assert dict(ratios({0: 1.0, 1: 3.0}, Grid(dp=2)))[1] == 3.0


def test_slow_rank_is_told_of_once_after_two_looks_and_again_after_it_had_recovered():
    stragglers = Stragglers(GRID, ratio=1.5)
    slow = EVEN | {5: 6.0}
    told = [stragglers.observe(work) for work in (slow, slow, slow, EVEN, slow, slow)]
    assert told == [[], [(5, 2.0)], [], [], [], [(5, 2.0)]]


def test_passing_disturbance_and_a_job_that_does_not_ask_tell_nothing():
    stragglers = Stragglers(GRID, ratio=1.5)
    assert [stragglers.observe(w) for w in (EVEN | {1: 9.0}, EVEN | {2: 9.0}, EVEN)] == [[], [], []]
    never = Stragglers(GRID, ratio=0.0)
    assert [never.observe(EVEN | {1: 9.0}) for _ in range(3)] == [[], [], []]
