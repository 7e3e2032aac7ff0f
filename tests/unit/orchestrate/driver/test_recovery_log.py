import pytest

from raymega.config.elastic import ElasticSection
from raymega.orchestrate.core.failure_policy import Failure, FailureKind, policy_of
from raymega.orchestrate.driver.recovery_log import PHASES, RecoveryLog
from tests.support.fakes import FakeClock

FAILURE = Failure(kind=FailureKind.DIED, rank=3, step=7, message="killed")


class Driver:
    """A log whose clock is at 0 when the driver takes up the run; a step that is added takes no time."""

    def __init__(self, first_step=0):
        self.clock = FakeClock()
        self.clock.now_s = 0.0
        self.log = RecoveryLog(policy_of(ElasticSection()), self.clock, first_step=first_step)

    def lost_at(self, now_s, *, step, progress_s):
        self.clock.now_s = now_s
        self.log.begin(FAILURE, step=step, last_sign_s=progress_s)

    def passed(self, phase, now_s):
        self.clock.now_s = now_s
        self.log.passed(phase)

    def recovered(self, now_s, *, step):
        self.clock.now_s = now_s
        return self.log.add_step(step, seconds=1.0)


def test_phases_add_up_to_the_recovery():
    driver = Driver()
    driver.lost_at(10.0, step=7, progress_s=9.5)
    for seconds, phase in enumerate(PHASES[:-1], start=11):
        driver.passed(phase, float(seconds))
    driver.passed("abort", 11.5)
    driver.log.go_back(6, source="memory")
    event = driver.recovered(20.0, step=7)
    assert event.recovery_s == sum(event.phases.values()) == 10.0
    assert list(event.phases) == list(PHASES) and event.lost_steps == 1
    assert (event.rank, event.restored_step, event.source) == (3, 6, "memory")
    assert event.detection_s == 0.5


def test_phase_of_a_failed_try_counts_to_the_one_that_was_not_reached():
    driver = Driver()
    driver.lost_at(10.0, step=7, progress_s=9.5)
    driver.passed("rendezvous", 12.0)
    driver.lost_at(12.5, step=6, progress_s=12.0)
    driver.passed("abort", 13.0)
    driver.log.go_back(6, source="store")
    event = driver.recovered(14.0, step=8)
    assert event.phases["abort"] == 3.0 and event.phases["rendezvous"] == 0.0


def test_recovery_is_over_once_with_as_many_steps_as_there_were():
    driver = Driver()
    assert driver.recovered(1.0, step=1) is None
    driver.lost_at(10.0, step=7, progress_s=9.5)
    driver.log.go_back(4, source="store")
    events = [driver.recovered(11.0, step=step) for step in (5, 6, 7, 8)]
    assert [event and event.lost_steps for event in events] == [None, None, 3, None]


def test_goodput_is_step_time_over_wall_time():
    driver = Driver()
    driver.log.add_step(1, seconds=2.0)
    driver.log.add_step(2, seconds=3.0)
    driver.clock.advance(10.0)
    assert driver.log.wall_s == 10.0
    assert driver.log.goodput(10.0) == pytest.approx(0.5)


def test_goodput_counts_a_step_that_was_done_again_once():
    log = Driver(first_step=4).log
    for step in (5, 6, 7):
        log.add_step(step, seconds=1.0)
    log.go_back(5, source="store")
    assert log.goodput(10.0) == pytest.approx(0.1)
    log.add_step(6, seconds=1.0)
    assert log.goodput(10.0) == pytest.approx(0.2)


def test_goodput_goes_back_behind_its_first_step():
    log = Driver(first_step=4).log
    log.add_step(5, seconds=1.0)
    log.go_back(2, source="store")
    for step in (3, 4):
        log.add_step(step, seconds=1.0)
    log.go_back(3, source="store")
    assert log.goodput(10.0) == pytest.approx(0.1)


def test_goodput_is_zero_before_time_has_passed():
    assert Driver().log.goodput(0.0) == 0.0
