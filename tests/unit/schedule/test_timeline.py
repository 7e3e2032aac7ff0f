"""Overlap: what collectives cost a step, from their events."""

from raymega.schedule.timeline import BETWEEN_CP, overlap


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


def test_transfers_between_context_parallel_ranks_are_counted_apart():
    row = [
        ("cp_pass", 0, 0, 0.0, 2.0),
        ("wait_cp_pass", 0, 0, 1.5, 2.0),
        ("reduce", 0, 0, 1.0, 2.0),
        ("wait_reduce", 0, 0, 1.0, 2.0),
    ]
    assert overlap([row], BETWEEN_CP) == (0.5, 0.75)
    assert overlap([row]) == (1.0, 0.0)
    assert overlap([row[2:]], BETWEEN_CP) is None
