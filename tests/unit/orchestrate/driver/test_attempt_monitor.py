import pytest

from raymega.config.schema import ElasticSection
from raymega.events import EvaluationFinished
from raymega.messages import Progress, WorkerDied, Working
from raymega.orchestrate.core.failure_policy import FailureKind
from raymega.orchestrate.driver.attempt_monitor import PROGRESS_MARGIN_S, SETTLE_S, AttemptMonitor
from tests.support.fakes import FakeWorkers

ELASTIC = ElasticSection(start_timeout_s=60.0, collective_timeout_s=100.0)
DEADLINE_S = 100.0 + PROGRESS_MARGIN_S


def make_attempt(world_size=4):
    return AttemptMonitor(world_size=world_size, first_step=10, elastic=ELASTIC, now_s=0.0)


def feed(attempt, polls, now_s):
    for reports in polls:
        for report in reports:
            attempt.observe(report, now_s)


@pytest.fixture
def workers():
    return FakeWorkers(4, step=10)


@pytest.fixture
def running(workers):
    attempt = make_attempt()
    feed(attempt, workers.enter(), 1.0)
    return attempt


def test_attempt_has_met_when_every_rank_has_entered(workers):
    attempt = make_attempt()
    (reports,) = workers.enter()
    feed(attempt, [reports[:3]], 1.0)
    assert not attempt.has_met
    feed(attempt, [reports[3:4]], 2.0)
    assert attempt.has_met
    assert not attempt.has_restored(0)
    feed(attempt, [reports], 2.0)
    assert attempt.has_restored(0)


def test_attempt_follows_steps_and_is_finished_when_every_rank_is(running, workers):
    feed(running, workers.steps(2), 5.0)
    assert (running.step, running.last_sign_s) == (12, 5.0)
    (reports,) = workers.finish()
    feed(running, [reports[:3]], 6.0)
    assert not running.is_finished
    feed(running, [reports[3:]], 6.0)
    assert running.is_finished


def test_failure_is_none_while_all_is_well(running):
    assert running.failure(2.0) is None


def test_failure_is_a_death_at_once(running, workers):
    feed(running, workers.steps(3) + workers.die(2), 2.0)
    failure = running.failure(2.0)
    assert (failure.kind, failure.rank, failure.step) == (FailureKind.DIED, 2, 13)


def test_failure_is_an_error_with_its_class_and_step(running, workers):
    feed(running, workers.steps(1) + workers.fail(3), 2.0)
    failure = running.failure(2.0)
    assert (failure.kind, failure.rank, failure.error) == (FailureKind.RAISED, 3, "ValueError")
    assert (failure.step, failure.traceback) == (11, "Traceback ...")


def test_failure_before_the_first_step_counts_from_the_restored_one(running):
    feed(running, FakeWorkers(4, step=0).fail(1), 2.0)
    assert running.failure(2.0).step == 10


def test_failure_waits_for_the_cause_of_a_lost_connection(running, workers):
    feed(running, workers.fail(0, "CommunicationError", is_secondary=True), 2.0)
    assert running.failure(2.0) is None
    feed(running, workers.die(3), 2.1)
    assert (running.failure(2.1).kind, running.failure(2.1).rank) == (FailureKind.DIED, 3)


def test_failure_names_the_one_silent_rank_when_all_others_lost_it(running, workers):
    for rank in (0, 1, 3):
        feed(running, workers.fail(rank, "CommunicationError", is_secondary=True), 2.0)
    failure = running.failure(2.0 + SETTLE_S)
    assert (failure.kind, failure.rank) == (FailureKind.HUNG, 2)
    assert "CommunicationError" in failure.message


def test_failure_is_the_first_lost_connection_when_nobody_owns_up(running, workers):
    feed(running, workers.fail(1, "CommunicationError", is_secondary=True), 2.0)
    feed(running, workers.fail(0, "CommunicationError", is_secondary=True), 2.5)
    failure = running.failure(2.0 + SETTLE_S)
    assert (failure.kind, failure.rank) == (FailureKind.RAISED, 1)


def test_failure_is_the_lost_connection_inside_a_plugin_if_there_is_one(running, workers):
    told = "all_reduce on world failed; it was raised in callback acme.sum at sum.py:9"
    for rank, message in ((1, ""), (0, told), (2, ""), (3, "")):
        lost = workers.fail(rank, "CommunicationError", is_secondary=True, message=message)
        feed(running, lost, 2.0 + rank % 2)
    failure = running.failure(3.0 + SETTLE_S)
    assert (failure.rank, failure.message) == (0, told)


def test_failure_names_ranks_that_did_not_join_in_time(workers):
    attempt = make_attempt()
    (reports,) = workers.enter()
    feed(attempt, [reports[:2]], 1.0)
    assert attempt.failure(59.9) is None
    failure = attempt.failure(60.0)
    assert (failure.kind, failure.rank) == (FailureKind.HUNG, -1)
    assert "ranks 2, 3" in failure.message and "elastic.start_timeout_s=60" in failure.message


def test_failure_names_ranks_that_stand_still(running, workers):
    (reports,) = workers.steps(1)
    feed(running, [reports[:3]], 10.0)
    assert running.failure(10.0 + DEADLINE_S - 0.1) is None
    failure = running.failure(10.0 + DEADLINE_S)
    assert (failure.kind, failure.rank) == (FailureKind.HUNG, 3)
    assert "no step after step 11" in failure.message and "rank 3" in failure.message


def test_failure_does_not_name_ranks_that_are_done(running, workers):
    (reports,) = workers.finish()
    feed(running, [reports[:3]], 10.0)
    assert running.failure(10.0 + DEADLINE_S).rank == 3


def test_beats_of_a_rank_that_stands_still_are_no_progress(running):
    feed(running, [[Progress(rank=1, step=10)]], 50.0)
    assert running.failure(1.0 + DEADLINE_S) is not None


def test_failure_of_many_names_only_some():
    attempt = AttemptMonitor(world_size=100, first_step=0, elastic=ELASTIC, now_s=0.0)
    assert "and 92 more" in attempt.failure(60.0).message


def test_signs_of_life_other_than_steps_put_the_deadline_off(running, workers):
    feed(running, [[EvaluationFinished(step=10, metrics={})]], 90.0)
    feed(running, workers.save(), 180.0)
    assert running.failure(180.0 + DEADLINE_S - 0.1) is None
    assert running.failure(180.0 + DEADLINE_S) is not None


def test_the_first_cause_stays_the_cause(running):
    feed(running, [[WorkerDied(rank=r, cause="x")] for r in (2, 0)], 2.0)
    assert running.failure(2.0).rank == 2


def test_work_that_goes_on_is_no_silence_and_true_silence_still_ends_it(running):
    """An evaluation, a restore or a save of four deadlines, told in portions."""
    for number in range(1, 9):
        now_s = number * DEADLINE_S / 2
        assert running.failure(now_s) is None
        feed(running, [[Working(rank=number % 4)]], now_s)
    assert running.failure(5 * DEADLINE_S - 0.1) is None
    assert running.failure(5 * DEADLINE_S).kind == FailureKind.HUNG
