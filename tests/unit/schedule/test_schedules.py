"""Every schedule: the papers' orders, and their promises for any size."""

import inspect
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.errors import PlanError
from raymega.schedule.checker import check
from raymega.schedule.instructions import COMPUTE, RECEIVE, Op
from raymega.schedule.order import Sizes
from raymega.schedule.schedules import interleaved, one_f_one_b, zero_bubble
from raymega.schedule.schedules.gpipe import forward_only
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.stage_placement import Placement
from raymega.schedule.table import (
    SCHEDULES,
    make_forward_only,
    make_placement,
    make_schedule,
    schedule_faults,
)
from raymega.schedule.text import LETTERS, timetable
from raymega.schedule.transfers import rounds

sizes = st.integers(1, 8)
counts = st.integers(1, 20)
times = st.floats(0.1, 10)
many = settings(max_examples=400, deadline=None)


ALL = tuple(sorted(SCHEDULES))


@st.composite
def requests(draw, names=ALL):
    """A schedule's name and sizes that it can have."""
    name = draw(st.sampled_from(names))
    kind, pp = SCHEDULES[name], draw(sizes)
    return name, Sizes(
        pp=pp,
        num_micro_batches=draw(counts),
        chunks=draw(st.integers(kind.least_chunks, min(4, kind.most_chunks))),
        microbatch_group_size_per_vp_stage=draw(st.sampled_from([0, pp, pp + 1, 2 * pp])),
        max_in_flight_microbatches=draw(st.integers(1, 2 * pp + 1)),
    )


def _make(name, *, pp, m, chunks=1):
    return make_schedule(name, Sizes(pp=pp, num_micro_batches=m, chunks=chunks))


def _computes(schedule, op=None):
    return " ".join(
        f"{LETTERS[i.op]}{i.micro_batch}"
        for i in schedule
        if i.op in COMPUTE and op in (None, i.op)
    )


def test_1f1b_has_the_order_of_megatrons_figure_4():
    assert [_computes(schedule) for schedule in _make("1f1b", pp=4, m=8).lists] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_1f1b_with_fewer_micro_batches_than_ranks_is_all_warmup_and_cooldown():
    lists = _make("1f1b", pp=4, m=2).lists
    assert _computes(lists[0]) == "F0 F1 B0 B1"
    assert _computes(lists[3]) == "F0 B0 F1 B1"


def test_interleaved_table_is_group_by_group_and_chunk_by_chunk():
    schedule = _make("interleaved", pp=2, m=4, chunks=2).lists[0]
    forwards = [(i.micro_batch, i.chunk) for i in schedule if i.op == Op.FORWARD]
    assert forwards == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    backwards = [(i.micro_batch, i.chunk) for i in schedule if i.op == Op.BACKWARD]
    assert backwards == [(i, 1 - chunk) for i, chunk in forwards]


def test_1f1b_with_chunks_is_interleaved():
    wanted = Sizes(pp=3, num_micro_batches=7, chunks=2, microbatch_group_size_per_vp_stage=4)
    assert make_schedule("1f1b", wanted) == make_schedule("interleaved", wanted)


@pytest.mark.parametrize(
    ("module", "program", "units"),
    [
        (one_f_one_b, _make("1f1b", pp=4, m=8), 19),
        (interleaved, _make("interleaved", pp=2, m=4, chunks=2), 17),
        (zero_bubble, _make("zb_h1", pp=3, m=6), 20),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_timetable_in_a_docstring_is_the_real_one(module, program, units):
    drawn = timetable(program, max_units=units).splitlines()
    assert [line for line in inspect.getdoc(module).splitlines() if "rank 0  F" in line or " rank " in line[:9]] == [
        f"    {line}" for line in drawn
    ]  # fmt: skip


def test_gpipe_does_every_forward_before_any_backward():
    lists = _make("gpipe", pp=3, m=3).lists
    assert {_computes(schedule) for schedule in lists} == {"F0 F1 F2 B0 B1 B2"}


def test_middle_stage_receives_and_sends_around_each_pass():
    lists = _make("1f1b", pp=3, m=1).lists[1]
    assert [i.op for i in lists] == [op for op in Op if "backward_" not in op]


@many
@given(requests())
def test_training_schedule_is_legal_and_keeps_its_promise_of_memory(request):
    name, wanted = request
    pp, m, chunks = wanted.pp, wanted.num_micro_batches, wanted.chunks
    peaks = check(make_schedule(name, wanted), num_micro_batches=m).peak_activations
    group = max(wanted.microbatch_group_size_per_vp_stage, pp)
    most = {
        "1f1b": [min(pp - rank, m) for rank in range(pp)],
        "gpipe": [m * chunks] * pp,
        "interleaved": [2 * (pp - rank - 1) + (chunks - 1) * group + 1 for rank in range(pp)],
        "zb_h1": [pp] * pp,
        "zb_h2": [2 * pp - 1] * pp,
        "zb_v": [2 * pp] * pp,
        "zb_auto": [wanted.max_in_flight_microbatches] * pp,
        "dualpipe_v": [2 * pp + 1] * pp,
    }
    promised = most["interleaved" if chunks > 1 and name == "1f1b" else name]
    if name == "gpipe" or (name == "1f1b" and chunks == 1):
        assert list(peaks) == promised
    assert all(peak <= limit for peak, limit in zip(peaks, promised, strict=True))


@many
@given(sizes, counts, st.integers(1, 4), st.booleans())
def test_forward_only_is_legal_and_holds_nothing(pp, m, chunks, is_vee):
    program = make_forward_only(Placement(pp=pp, chunks=chunks, is_vee=is_vee), m)
    result = check(program, num_micro_batches=m, is_forward_only=True)
    assert result.peak_activations == (0,) * pp


@given(sizes, st.integers(1, 4), st.booleans())
def test_stages_and_seats_are_a_bijection(pp, chunks, is_vee):
    placement = Placement(pp=pp, chunks=chunks, is_vee=is_vee)
    stages = [placement.stage(rank, chunk) for rank in range(pp) for chunk in range(chunks)]
    assert sorted(stages) == list(range(pp * chunks))
    for stage in stages:
        assert placement.stage(*placement.seat(stage)) == stage
    neighbours = zip(range(pp * chunks), range(1, pp * chunks), strict=False)
    hops = [placement.seat(b).rank - placement.seat(a).rank for a, b in neighbours]
    assert all(abs(hop) <= 1 for hop in hops) if is_vee else all(hop in (1, 1 - pp) for hop in hops)


@many
@given(requests())
def test_no_message_is_taken_before_it_must_be(request):
    """Between a receive and the work that needs it lie only other receives, or earlier sends."""
    name, wanted = request
    for schedule in make_schedule(name, wanted).lists:
        for here, after in pairwise(schedule):
            if here.op in RECEIVE:
                assert after.op in RECEIVE or after.op in COMPUTE


@many
@given(requests(("1f1b", "gpipe", "interleaved")), times, times)
def test_bubble_is_that_of_the_paper_whatever_the_durations(request, forward, backward):
    name, wanted = request
    if wanted.chunks > 1:  # the formula is for full groups
        group = max(wanted.microbatch_group_size_per_vp_stage, wanted.pp)
        wanted = replace(wanted, num_micro_batches=-(-wanted.num_micro_batches // group) * group)
    pp, m, chunks = wanted.pp, wanted.num_micro_batches, wanted.chunks
    durations = Durations(forward=forward, backward=backward, weight=0.0)
    simulation = simulate(make_schedule(name, wanted), durations)
    assert simulation.time == pytest.approx((m * chunks + pp - 1) * (forward + backward))
    assert simulation.bubble == pytest.approx((pp - 1) / (chunks * m))
    assert simulation.bubble_rate == pytest.approx((pp - 1) / (chunks * m + pp - 1))


def _idle(name, *, pp, m, chunks=1, durations):
    """Idle time of the longest rank."""
    simulation = simulate(_make(name, pp=pp, m=m, chunks=chunks), durations)
    return simulation.bubble * m * chunks * (durations.forward + durations.backward)


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(0, 10), st.floats(0.5, 1), st.floats(1, 1.5), st.floats(1, 1.5))
def test_idle_time_of_zb_h1_and_zb_h2_is_that_of_the_paper(pp, more, weight, forward, extra):
    """For F, B >= W, which the paper takes for granted; 2 * pp - 1 micro-batches or more."""
    backward = weight + max(forward * extra, weight)
    durations = Durations(forward=forward, backward=backward, weight=weight)
    input_part = backward - weight
    m = 2 * pp + more
    h1 = _idle("zb_h1", pp=pp, m=m, durations=durations)
    assert h1 <= (pp - 1) * (forward + input_part - weight) + 1e-9 or pp == 1
    h2 = _idle("zb_h2", pp=pp, m=m, durations=durations)
    assert h2 <= h1 + 1e-9


@pytest.mark.parametrize("pp", range(1, 9))
@pytest.mark.parametrize("more", [0, 1, 5])
def test_closed_forms_with_equal_times(pp, more):
    m, unit = 2 * pp + more, Durations()
    assert _idle("zb_h1", pp=pp, m=m, durations=unit) == pytest.approx(pp - 1)
    assert _idle("zb_h2", pp=pp, m=m, durations=unit) == pytest.approx(0)
    assert _idle("zb_v", pp=pp, m=m, chunks=2, durations=unit) == pytest.approx(0)
    # DualPipe's table: (pp - 1) * (F&B + B - 3 W), with F, B and W one each and F&B three.
    assert _idle("dualpipe_v", pp=pp, m=m, chunks=2, durations=unit) == pytest.approx(pp - 1)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("m", [3, 8, 24])
def test_zb_auto_is_never_worse_than_a_fixed_order_of_its_memory(pp, m):
    bubbles = {}
    for name, limit in (("zb_h1", pp), ("zb_h2", 2 * pp - 1)):
        auto = Sizes(pp=pp, num_micro_batches=m, max_in_flight_microbatches=limit)
        bubbles[name] = simulate(make_schedule("zb_auto", auto), Durations()).bubble
        assert bubbles[name] <= simulate(_make(name, pp=pp, m=m), Durations()).bubble + 1e-12
    assert bubbles["zb_h2"] <= bubbles["zb_h1"]


def test_make_schedule_reports_every_wrong_number_at_once():
    with pytest.raises(PlanError) as caught:
        _make("2f2b", pp=0, m=0)
    text = str(caught.value)
    assert "parallel.pp=0" in text and "num_micro_batches=0" in text and "'2f2b'" in text


@pytest.mark.parametrize(
    ("name", "chunks", "remedy"),
    [("interleaved", 1, 2), ("zb_h1", 2, 1), ("zb_v", 1, 2), ("dualpipe_v", 3, 2)],
)
def test_chunks_that_a_schedule_cannot_have_are_refused_with_those_it_can(name, chunks, remedy):
    with pytest.raises(
        PlanError, match=rf"schedule\.chunks={chunks}.*set schedule\.chunks={remedy}"
    ):
        _make(name, pp=2, m=4, chunks=chunks)


def test_group_smaller_than_the_pipeline_is_refused():
    wanted = Sizes(pp=4, num_micro_batches=8, chunks=2, microbatch_group_size_per_vp_stage=3)
    with pytest.raises(
        PlanError, match=r"schedule\.microbatch_group_size_per_vp_stage=3.*use 4 or more"
    ):
        make_schedule("interleaved", wanted)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_placement_of_a_schedule_is_the_one_its_lists_are_made_for(name):
    chunks = SCHEDULES[name].least_chunks
    placement = make_placement(name, pp=4, chunks=chunks)
    assert _make(name, pp=4, m=3, chunks=chunks).placement == placement
    assert placement.are_ends_together == (name in ("zb_v", "dualpipe_v"))


@many
@given(pp=sizes, m=counts)
def test_paired_passes_of_dualpipe_v_are_legal_and_follow_each_other(pp, m):
    wanted = Sizes(pp=pp, num_micro_batches=m, chunks=2, is_paired=True)
    program = make_schedule("dualpipe_v", wanted)
    plain = make_schedule("dualpipe_v", replace(wanted, is_paired=False))
    peaks = [check(each, num_micro_batches=m).peak_activations for each in (program, plain)]
    assert peaks[0] == peaks[1]
    for paired, alone in zip(program.lists, plain.lists, strict=True):
        assert _computes(paired) == _computes(alone)
        pairs = [tasks for tasks in rounds(paired) if len(tasks) == 2]
        assert all(f.micro_batch != b.micro_batch for f, b in pairs)
        assert len(pairs) >= 2 * (m - 2 * pp)


def test_paired_1f1b_of_one_rank_is_one_forward_ahead():
    program = make_schedule("1f1b", Sizes(pp=1, num_micro_batches=4, is_paired=True))
    assert check(program, num_micro_batches=4).peak_activations == (2,)
    texts = [_computes(tasks) for tasks in rounds(program.lists[0])]
    assert texts == ["F0", "F1 B0", "F2 B1", "F3 B2", "B3"]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_number_of_chunks_that_a_schedule_does_not_have_is_a_fault(name):
    kind = SCHEDULES[name]
    for chunks in range(1, 5):
        sizes = Sizes(pp=2, num_micro_batches=4, chunks=chunks)
        told = [fault.fact for fault in schedule_faults(name, sizes)]
        is_legal = kind.least_chunks <= chunks <= kind.most_chunks
        assert (f"schedule.chunks={chunks}" in told) != is_legal


def test_forward_only_takes_what_arrives_first():
    first, last = forward_only(Placement(pp=2, chunks=2), 2)
    # stages 0 and 2: micro-batch 1 is there before micro-batch 0 comes round
    assert [(each.chunk, each.micro_batch) for each in first] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert first == last
