"""Who hangs: a stopped process, a thread that stands still; and who does not, however slow it is."""

from dataclasses import replace

import pytest

from raymega.config.elastic import ElasticSection
from raymega.orchestrate.core.worker_group_api import Heartbeat, ProcessStatus, ThreadStatus
from raymega.orchestrate.driver.hang_detector import HangDetector

WAITING = ThreadStatus(
    rank=0, step=7, doing="forward 1/0", waits_for="all_reduce on group tp of ranks 0, 1",
    is_patient=False, state="S", cpu_s=3.0, stack=("comm.py:88 wait",),
)  # fmt: skip
STUCK = replace(WAITING, rank=1, waits_for="", stack=("hooks.py:3 spoil",))


def make_watch(steps=3, step_s=1.1 / 3, **fields):  # of which the deadline is 2.6 s
    detector = HangDetector(ElasticSection(**fields))
    for _ in range(steps):
        detector.add_step(step_s)
    return detector


def look(detector, at_s, *statuses):
    for status in statuses:
        detector.observe(status, at_s)


@pytest.mark.parametrize(
    ("step_s", "fields", "deadline_s"),
    [
        (0.2, {}, 2.1),
        (10.0, {}, 31.5),
        (0.2, {"hang_timeout_min_s": 20.0}, 20.0),
        (300.0, {"hang_timeout_max_s": 60.0}, 60.0),
    ],
)
def test_deadline_is_learned_from_steps_within_the_jobs_bounds(step_s, fields, deadline_s):
    assert make_watch(step_s=step_s, **fields).deadline_s == pytest.approx(deadline_s)


def test_deadline_follows_the_newest_steps():
    detector = make_watch(steps=30)
    for _ in range(15):
        detector.add_step(1.0)
    assert detector.deadline_s == pytest.approx(4.5)


def answer(detector, ranks, at_s):
    for rank in ranks:
        detector.observe(Heartbeat(rank=rank), at_s)


def test_stopped_process_is_found_at_the_deadline_and_looked_at_before():
    detector = make_watch()
    answer(detector, (0, 1), 10.0)
    answer(detector, (0,), 12.0)
    assert detector.probe_due(12.0, last_sign_s=12.0, is_training=True) is None
    answer(detector, (0,), 12.2)
    assert detector.probe_due(12.2, last_sign_s=12.2, is_training=True) == {1}
    assert detector.probe_due(12.3, last_sign_s=12.2, is_training=True) is None, (
        "a look takes its time"
    )
    detector.observe(ProcessStatus(rank=1, state="T"), 12.3)
    assert detector.hang(12.5, last_sign_s=12.0, is_training=True) is None
    answer(detector, (0,), 12.7)
    hang = detector.hang(12.7, last_sign_s=12.0, is_training=True)
    assert hang.rank == 1 and "state T" in hang.message


def test_stopped_process_is_found_while_the_others_have_nothing_to_say():
    detector = make_watch()
    answer(detector, (0, 1), 10.0)
    answer(detector, (0,), 12.0)
    detector.observe(ProcessStatus(rank=1, state="T"), 12.3)
    assert detector.hang(12.7, last_sign_s=12.0, is_training=True).rank == 1


def test_silent_process_that_is_not_stopped_has_until_the_upper_bound():
    detector = make_watch(hang_timeout_max_s=30.0)
    answer(detector, (0, 1), 0.0)
    answer(detector, (0,), 29.0)
    detector.observe(ProcessStatus(rank=1, state="R"), 29.0)
    assert detector.hang(29.0, last_sign_s=29.0, is_training=True) is None
    answer(detector, (0,), 30.0)
    assert (
        "elastic.hang_timeout_max_s=30"
        in detector.hang(30.0, last_sign_s=30.0, is_training=True).message
    )


def test_driver_that_was_held_up_accuses_nobody():
    detector = make_watch()
    answer(detector, (0, 1), 0.0)
    answer(detector, (0, 1), 9.0)
    assert detector.probe_due(9.1, last_sign_s=9.1, is_training=True) is None


def test_process_that_goes_on_is_forgiven():
    detector = make_watch()
    answer(detector, (0, 1), 0.0)
    detector.observe(ProcessStatus(rank=1, state="T"), 2.5)
    answer(detector, (0, 1), 3.0)
    assert detector.hang(3.1, last_sign_s=3.0, is_training=True) is None


def test_thread_that_stands_still_outside_of_collectives_is_named():
    detector = make_watch()
    assert detector.probe_due(12.0, last_sign_s=10.0, is_training=True) is None
    assert detector.probe_due(12.2, last_sign_s=10.0, is_training=True) == frozenset()
    look(detector, 12.2, WAITING, STUCK)
    assert detector.hang(12.7, last_sign_s=10.0, is_training=True) is None, "one look is none"
    look(detector, 12.7, WAITING, STUCK)
    assert detector.hang(12.5, last_sign_s=10.0, is_training=True) is None, (
        "the deadline is not over"
    )
    hang = detector.hang(12.7, last_sign_s=10.0, is_training=True)
    assert hang.rank == 1 and "forward 1/0" in hang.message and "hooks.py:3 spoil" in hang.message


def test_ranks_that_all_wait_for_each_other_hang_and_none_is_named():
    detector = make_watch()
    for at_s in (12.2, 12.7):
        look(detector, at_s, WAITING, replace(WAITING, rank=1, waits_for="receive from rank 0"))
    hang = detector.hang(12.7, last_sign_s=10.0, is_training=True)
    assert hang.rank == -1 and "receive from rank 0" in hang.message


def test_rank_that_has_not_said_where_it_stands_keeps_the_others_from_being_judged():
    """It may be the one that is stopped: its silence began later than that of the steps."""
    detector = make_watch()
    answer(detector, (0, 1), 11.0)
    answer(detector, (0,), 12.7)
    for at_s in (12.2, 12.7):
        look(detector, at_s, WAITING)
    assert detector.hang(12.7, last_sign_s=10.0, is_training=True) is None
    answer(detector, (0,), 13.7)
    detector.observe(ProcessStatus(rank=1, state="T"), 13.7)
    assert detector.hang(13.7, last_sign_s=10.0, is_training=True).rank == 1


@pytest.mark.parametrize(
    "second",
    [
        replace(STUCK, state="R"),
        replace(STUCK, state="D"),
        replace(STUCK, state=""),
        replace(STUCK, cpu_s=3.2),
        replace(STUCK, is_patient=True),
        replace(STUCK, stack=("other.py:1 go",)),
    ],
    ids=["running", "disk", "unknown", "busy", "patient", "moved"],
)
def test_rank_that_is_only_slow_is_no_hang(second):
    detector = make_watch()
    look(detector, 12.2, WAITING, STUCK)
    look(detector, 12.7, WAITING, second)
    assert detector.hang(60.0, last_sign_s=10.0, is_training=True) is None


def test_nothing_is_known_of_threads_before_some_steps_are():
    detector = make_watch(steps=2)
    assert detector.probe_due(99.0, last_sign_s=0.0, is_training=True) is None
    for at_s in (12.2, 12.7):
        look(detector, at_s, WAITING, STUCK)
    assert detector.hang(99.0, last_sign_s=0.0, is_training=True) is None


def test_threads_are_left_alone_until_all_ranks_have_their_state():
    detector = HangDetector(ElasticSection(), steps_s=(0.2,) * 3)
    assert detector.probe_due(12.2, last_sign_s=10.0, is_training=False) is None
    assert detector.probe_due(12.2, last_sign_s=10.0, is_training=True) == frozenset(), (
        "known before"
    )
    for at_s in (12.2, 12.7):
        look(detector, at_s, STUCK)
    assert detector.hang(12.7, last_sign_s=10.0, is_training=False) is None
    assert detector.hang(12.7, last_sign_s=10.0, is_training=True).rank == 1


def test_looks_of_before_the_last_sign_do_not_count():
    detector = make_watch()
    for at_s in (12.2, 12.7):
        look(detector, at_s, WAITING, STUCK)
    assert detector.hang(16.0, last_sign_s=12.3, is_training=True) is None


def test_signs_that_come_in_a_longer_interval_may_be_as_much_later():
    """A monitor of many nodes answers every four seconds."""
    detector = make_watch()
    for rank in (0, 1):
        detector.observe(Heartbeat(rank=rank, every_s=4.0), 10.0)
    detector.observe(Heartbeat(rank=0, every_s=4.0), 15.0)
    assert detector.probe_due(15.0, last_sign_s=15.0, is_training=True) is None
    detector.observe(Heartbeat(rank=0, every_s=4.0), 16.0)
    assert detector.probe_due(16.0, last_sign_s=16.0, is_training=True) == {1}
