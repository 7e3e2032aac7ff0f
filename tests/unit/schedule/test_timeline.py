"""Overlap: what collectives cost a step, from their events."""

from raymega.schedule.timeline import overlap


def test_work_alone_has_no_overlap():
    assert overlap([[("forward", 0, 0, 0.0, 1.0)], []]) is None


def test_only_time_that_was_waited_is_exposed_and_covered_time_counts_once():
    first = [
        ("reduce", 0, 0, 0.0, 4.0),
        ("reduce", 1, 0, 2.0, 6.0),
        ("wait_reduce", 0, 0, 3.0, 4.0),
        ("wait_reduce", 1, 0, 4.0, 6.0),
        ("backward", 0, 0, 0.0, 3.0),
    ]
    second = [("gather", 0, 0, 1.0, 3.0), ("wait_gather", 0, 0, 3.0, 3.0)]
    assert overlap([first, second]) == (1.5, 1 - 3 / 8)


def test_everything_waited_for_is_nothing_hidden():
    row = [("gather", 0, 0, 1.0, 3.0), ("wait_gather", 0, 0, 1.0, 3.001)]
    assert overlap([row]).hidden_share == 0.0
