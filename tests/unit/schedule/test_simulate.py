"""The abstract machine: who waits for whom, and how idle time is counted."""

import pytest

from raymega.schedule.order import Sizes
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.stage_placement import Placement
from raymega.schedule.table import make_forward_only, make_schedule
from raymega.schedule.timeline import Event, bubble

UNIT = Durations(forward=1.0, backward=2.0, transfer=0.0)


def test_receive_lasts_until_the_message_arrives():
    lists = make_schedule("1f1b", Sizes(pp=2, num_micro_batches=1))
    events = simulate(lists, Durations(forward=3.0, backward=5.0, transfer=0.5)).events
    assert events[0] == (
        ("forward", 0, 0, 0.0, 3.0),
        ("send_forward", 0, 0, 3.0, 3.0),
        ("recv_backward", 0, 0, 3.0, 12.0),
        ("backward", 0, 0, 12.0, 17.0),
    )
    assert events[1][0] == Event("recv_forward", 0, 0, 0.0, 3.5)


def test_events_keep_the_order_of_the_list():
    lists = make_schedule("gpipe", Sizes(pp=3, num_micro_batches=4))
    for schedule, events in zip(lists.lists, simulate(lists, UNIT).events, strict=True):
        assert [(i.op, i.micro_batch) for i in schedule] == [event[:2] for event in events]


def test_forward_only_drains_after_the_last_forward():
    assert simulate(make_forward_only(Placement(pp=4), 8), UNIT).time == 8 + 3


def test_transfers_lengthen_1f1b_more_than_gpipe_when_every_hop_is_on_the_path():
    durations = Durations(forward=1.0, backward=2.0, transfer=1.0)
    times = {
        name: simulate(make_schedule(name, Sizes(pp=4, num_micro_batches=8)), durations).time
        for name in ("1f1b", "gpipe")
    }
    assert times["gpipe"] == (8 + 3) * 3 + 2 * 3
    assert times["1f1b"] > times["gpipe"]


def test_bubble_counts_idle_ranks_and_waits_but_not_what_lies_outside_the_work():
    rows = [
        [
            ("recv_forward", 0, 0, 0.0, 4.0),
            ("forward", 0, 0, 4.0, 5.0),
            ("backward", 0, 0, 6.0, 7.0),
        ],
        [("forward", 0, 0, 2.0, 4.0), ("recv_backward", 0, 0, 4.0, 99.0)],
    ]
    # The longest rank takes 3, from 4 to 7; both are charged with that.
    measured = bubble(rows)
    assert measured.ratio == pytest.approx((2 * 3 - 4) / 4)
    assert measured.rate == pytest.approx(2 / 6)


def test_bubble_of_nothing_is_zero():
    assert bubble([[], []]) == (0.0, 0.0)


def test_parts_of_a_backward_take_its_time_together():
    durations = Durations(forward=1.0, backward=2.5, weight=0.5)
    events = simulate(make_schedule("zb_h1", Sizes(pp=1, num_micro_batches=1)), durations).events
    assert [event[3:] for event in events[0]] == [(0.0, 1.0), (1.0, 3.0), (3.0, 3.5)]


def test_message_to_the_ranks_own_next_chunk_costs_nothing():
    program = make_schedule("gpipe", Sizes(pp=1, num_micro_batches=1, chunks=2))
    assert simulate(program, Durations(transfer=9.0, handling=9.0)).time == 2 * 3


def test_handling_occupies_both_ranks():
    program = make_schedule("gpipe", Sizes(pp=2, num_micro_batches=1))
    assert simulate(program, Durations(handling=0.5)).time == 2 * 3 + 4 * 0.5
