"""The bill of a run: against sums by hand, ramps, evaluations, what is done already, spot nodes."""

from dataclasses import replace
from math import inf

import pytest

from raymega.plan.hardware.catalog import CATALOGUE
from raymega.planner.bill import RESTART_S, bill_lines, dollars, make_bill
from tests.support.jobs import make_test_plan

H100 = CATALOGUE["h100"]
PRICED = replace(H100, price_per_hour=2.5, spot_price_per_hour=1.0, interruptions_per_day=1.0)


def plan_of(*overrides):
    return make_test_plan("run.steps=1000", "run.eval_samples=0", *overrides)


def test_bill_is_steps_times_step_and_devices_times_hours():
    bill = make_bill(plan_of(), PRICED, 3.6)
    assert (bill.num_steps, bill.num_devices, bill.seconds) == (1000, 2, pytest.approx(3600.0))
    assert bill.tokens == 1000 * 16 * 32 and bill.device_hours == pytest.approx(2.0)
    assert bill.dollars == pytest.approx(5.0)
    assert make_bill(plan_of(), H100, 3.6).dollars is None


def test_steps_that_are_done_cost_nothing_more():
    bill = make_bill(plan_of(), PRICED, 3.6, first_step=750)
    assert bill.num_steps == 250 and bill.seconds == pytest.approx(900.0)
    assert make_bill(plan_of(), PRICED, 3.6, first_step=2000).seconds == 0.0


def test_steps_of_a_ramp_cost_as_their_micro_batches_do():
    """The first 10 steps have 4 of 16 sequences: 2 micro-batches and 1 to fill, of 8 and 1."""
    plan = plan_of("data.batch_ramp=[{until_samples: 40, global_batch_size: 4}]")
    bill = make_bill(plan, PRICED, 9.0)
    assert bill.seconds == pytest.approx(10 * 3.0 + 990 * 9.0)
    assert bill.tokens == (10 * 4 + 990 * 16) * 32
    later = make_bill(plan, PRICED, 9.0, first_step=8)
    assert later.seconds == pytest.approx(2 * 3.0 + 990 * 9.0)


def test_evaluations_are_forward_passes():
    plan = make_test_plan("run.steps=1000", "run.eval_samples=32", "run.eval_every=300")
    # after 300, 600, 900 and 1000 steps, two batches each
    bill = make_bill(plan, H100, 3.0)
    assert bill.evaluation_s == pytest.approx(4 * 2 * 1.0)
    assert bill.seconds == pytest.approx(3000.0 + 8.0)
    assert make_bill(plan, H100, 3.0, first_step=900).evaluation_s == pytest.approx(2.0)


def test_an_evaluation_reads_every_validation_set():
    two = "data.validation=[{name: a, path: synthetic}, {name: b, path: 'synthetic:b'}]"
    evaluated = ("run.steps=1000", "run.eval_samples=32", "run.eval_every=300")
    one, both = (make_test_plan(*evaluated, *more) for more in ((), (two,)))
    assert make_bill(both, H100, 3.0).evaluation_s == 2 * make_bill(one, H100, 3.0).evaluation_s


def test_spot_nodes_repeat_half_the_steps_since_the_last_save():
    spot = make_bill(plan_of("checkpoint.every=20"), PRICED, 36.0).spot
    lost_s = RESTART_S + 10 * 36.0
    assert spot.lost_s == pytest.approx(lost_s)
    # the whole time is the time without interruptions and what all interruptions cost
    assert spot.seconds == pytest.approx(36_000 + spot.interruptions * lost_s)
    assert spot.interruptions == pytest.approx(spot.seconds / 86_400)
    assert spot.dollars == pytest.approx(2 * spot.seconds / 3600)
    often = make_bill(plan_of("elastic.snapshot_every=1"), PRICED, 36.0).spot
    assert often.lost_s == pytest.approx(RESTART_S + 18.0) and often.seconds < spot.seconds


def test_run_that_is_interrupted_faster_than_it_saves_never_ends():
    worst = replace(PRICED, interruptions_per_day=500.0)
    bill = make_bill(plan_of("checkpoint.every=0"), worst, 36.0)
    assert bill.spot.seconds == inf
    assert "no progress" in list(bill_lines(bill, worst))[1]


def test_lines_say_time_hours_and_dollars():
    bill = make_bill(plan_of(), PRICED, 3600.0)
    whole, spot = bill_lines(bill, PRICED)
    assert (
        "1,000 steps, 512,000 tokens: 41 days 16 h; 2,000 GPU-hours; $5,000 at $2.5 an hour"
        in whole
    )
    assert spot.startswith("on spot nodes: $") and "1 expected of a node in a day" in spot
    (alone,) = bill_lines(make_bill(plan_of(), H100, 1.0), H100)
    assert "--price" in alone


@pytest.mark.parametrize(
    ("amount", "text"), [(0.5, "0.50"), (99.994, "99.99"), (123.4, "123"), (214_432.0, "214,000")]
)
def test_amounts_have_three_digits(amount, text):
    assert dollars(amount) == text
