"""1F1B, GPipe and forward-only: the papers' orders, and their promises for any size."""

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.errors import PlanError
from raymega.schedule import one_f_one_b as module
from raymega.schedule.checker import check
from raymega.schedule.instructions import Op
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.table import SCHEDULES, make_forward_only, make_schedule
from raymega.schedule.text import timetable

names = st.sampled_from(sorted(SCHEDULES))
sizes = st.integers(1, 8)
counts = st.integers(1, 12)
many = settings(max_examples=200, deadline=None)


def _computes(schedule):
    letters = {Op.FORWARD: "F", Op.BACKWARD: "B"}
    return " ".join(f"{letters[i.op]}{i.micro_batch}" for i in schedule if i.op in letters)


def test_1f1b_has_the_order_of_megatrons_figure_4():
    lists = make_schedule("1f1b", pp=4, num_micro_batches=8)
    assert [_computes(schedule) for schedule in lists] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_1f1b_with_fewer_micro_batches_than_stages_is_all_warmup_and_cooldown():
    lists = make_schedule("1f1b", pp=4, num_micro_batches=2)
    assert _computes(lists[0]) == "F0 F1 B0 B1"
    assert _computes(lists[3]) == "F0 B0 F1 B1"


def test_timetable_in_the_docstring_of_1f1b_is_the_real_one():
    lists = make_schedule("1f1b", pp=4, num_micro_batches=8)
    drawn = timetable(lists, max_units=19).splitlines()
    assert [line for line in inspect.getdoc(module).splitlines() if "F0" in line] == [
        f"    {line}" for line in drawn
    ]


def test_gpipe_does_every_forward_before_any_backward():
    lists = make_schedule("gpipe", pp=3, num_micro_batches=3)
    assert {_computes(schedule) for schedule in lists} == {"F0 F1 F2 B0 B1 B2"}


def test_middle_stage_receives_and_sends_around_each_pass():
    schedule = make_schedule("1f1b", pp=3, num_micro_batches=1)[1]
    assert [i.op for i in schedule] == list(Op)


@many
@given(names, sizes, counts)
def test_training_schedule_is_legal(name, pp, m):
    lists = make_schedule(name, pp=pp, num_micro_batches=m)
    peaks = check(lists, num_micro_batches=m).peak_activations
    wanted = {"1f1b": [min(pp - stage, m) for stage in range(pp)], "gpipe": [m] * pp}
    assert list(peaks) == wanted[name]


@many
@given(sizes, counts)
def test_forward_only_is_legal_and_holds_nothing(pp, m):
    lists = make_forward_only(pp=pp, num_micro_batches=m)
    result = check(lists, num_micro_batches=m, is_forward_only=True)
    assert result.peak_activations == (0,) * pp


@many
@given(names, sizes, counts, st.floats(0.1, 10), st.floats(0.1, 10))
def test_bubble_is_that_of_the_paper_whatever_the_durations(name, pp, m, forward, backward):
    durations = Durations(forward=forward, backward=backward, transfer=0.0)
    simulation = simulate(make_schedule(name, pp=pp, num_micro_batches=m), durations)
    assert simulation.time == pytest.approx((m + pp - 1) * (forward + backward))
    assert simulation.bubble == pytest.approx((pp - 1) / m)
    assert simulation.bubble_rate == pytest.approx((pp - 1) / (m + pp - 1))


def test_make_schedule_reports_every_wrong_number_at_once():
    with pytest.raises(PlanError) as caught:
        make_schedule("2f2b", pp=0, num_micro_batches=0)
    text = str(caught.value)
    assert "parallel.pp=0" in text and "num_micro_batches=0" in text and "'2f2b'" in text


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_several_chunks_are_refused(name):
    with pytest.raises(PlanError, match=r"schedule\.chunks=2"):
        make_schedule(name, pp=2, num_micro_batches=4, chunks=2)
