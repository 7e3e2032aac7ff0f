"""Recorded steps: messages are matched, clocks brought together, the schedule played again."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.schedule.order import Sizes
from raymega.schedule.recording import Recording
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.table import SCHEDULES, make_schedule
from raymega.schedule.timeline import Event, bubble

LATE_S = 0.4


def _recorded(name, *, pp, m, durations=None):
    """A simulated step in place of a recorded one."""
    sizes = Sizes(pp=pp, num_micro_batches=m, chunks=SCHEDULES[name].least_chunks)
    program = make_schedule(name, sizes)
    rows = simulate(program, durations or Durations()).events
    return Recording(
        rows=dict(enumerate(rows)), pipelines=(tuple(range(pp)),), placement=program.placement
    )


def _shift(recording, shifts):
    rows = {
        rank: tuple(
            e._replace(start_s=e.start_s + shifts[rank], end_s=e.end_s + shifts[rank]) for e in row
        )
        for rank, row in recording.rows.items()
    }
    return Recording(
        rows=rows,
        pipelines=recording.pipelines,
        replicas=recording.replicas,
        placement=recording.placement,
    )


def _is_causal(recording):
    return all(t.received.end_s >= t.sent.start_s - 1e-9 for t in recording.transfers())


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_message_between_ranks_is_matched_once(name):
    pp, m = 4, 6
    recording = _recorded(name, pp=pp, m=m)
    transfers = list(recording.transfers())
    hops = recording.placement.num_stages - 1
    if recording.placement.is_vee:
        hops -= 1  # the turn of the vee stays on its rank
    assert len(transfers) == len({t.message for t in transfers}) == 2 * hops * m
    for transfer in transfers:
        assert (transfer.sent.name, transfer.received.name) in (
            ("send_forward", "recv_forward"), ("send_backward", "recv_backward"),
        )  # fmt: skip
        assert transfer.sent.micro_batch == transfer.received.micro_batch
        assert transfer.sender != transfer.receiver


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 8), st.integers(0, 2**32)
)
def test_ranks_that_began_late_are_brought_onto_one_clock(name, pp, m, seed):
    draw = random.Random(seed)
    late = {rank: draw.uniform(0, 5.0) for rank in range(pp)}
    aligned = _shift(_recorded(name, pp=pp, m=m), {r: -s for r, s in late.items()}).aligned()
    assert _is_causal(aligned)


def test_clock_that_breaks_no_order_is_left_alone():
    recording = _recorded("1f1b", pp=4, m=4, durations=Durations(transfer=0.5))
    assert recording.aligned() == recording


def test_shift_is_no_larger_than_the_order_asks_for():
    """Rank 1 began 0.4 after rank 0 and says that everything was 0.4 earlier."""
    recording = _recorded("1f1b", pp=2, m=2)
    late = _shift(recording, {0: 0.0, 1: -LATE_S})
    assert not _is_causal(late)
    for rank, row in late.aligned().rows.items():
        for event, wanted in zip(row, recording.rows[rank], strict=True):
            assert event == pytest.approx(wanted)


def test_replicas_agree_that_no_sum_is_there_before_the_last_part():
    rows = {
        0: (Event("forward", 0, 0, 0.0, 1.0), Event("reduce", 0, 0, 1.0, 3.0)),
        1: (Event("forward", 0, 0, 0.0, 1.0), Event("reduce", 0, 0, 4.0, 4.5)),
    }
    placement = _recorded("1f1b", pp=1, m=1).placement
    recording = Recording(
        rows=rows, pipelines=((0,), (1,)), replicas=((0, 1),), placement=placement
    )
    aligned = recording.aligned().rows
    assert aligned[0][1] == ("reduce", 0, 0, 2.0, 4.0) and aligned[1] == rows[1]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedule_played_again_is_the_one_that_was_recorded(name):
    durations = Durations(forward=1.5, backward=4.0, weight=1.5)
    recording = _recorded(name, pp=4, m=8, durations=durations)
    assert recording.simulated().bubble == pytest.approx(bubble(recording.rows.values()).ratio)


def test_time_that_messages_took_is_no_part_of_the_simulated_bubble():
    slow = _recorded("1f1b", pp=4, m=8, durations=Durations(transfer=0.5, handling=0.1))
    assert slow.simulated().bubble == pytest.approx(3 / 8)
    assert bubble(slow.rows.values()).ratio > 3 / 8 + 0.1


def test_pipelines_beside_each_other_are_simulated_each_and_measured_together():
    one = _recorded("1f1b", pp=2, m=2)
    slow = {r + 2: [e._replace(start_s=2 * e.start_s, end_s=2 * e.end_s) for e in row]
            for r, row in one.rows.items()}  # fmt: skip
    both = Recording(rows={**one.rows, **slow}, pipelines=((0, 1), (2, 3)), placement=one.placement)
    assert both.simulated().bubble == pytest.approx(bubble(both.rows.values()).ratio)
    assert len(list(both.transfers())) == 2 * len(list(one.transfers()))
