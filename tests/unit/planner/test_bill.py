"""The bill of a run: against sums by hand, ramps, evaluations, what is done already, spot nodes."""

from dataclasses import replace
from math import inf

import pytest

from raymega.cli.plan.bill import bill_of
from raymega.plan.batch import row_length
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.run_plan import with_options
from raymega.planner.bill import RESTART_S, bill_lines, dollars, make_bill
from raymega.planner.cost.evaluation_time import evaluation_s, sample_s
from tests.support.jobs import layout_overrides, make_test_plan

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


def test_samples_of_text_are_paid_for_each_time_they_are_drawn():
    """After steps 300, 600 and 900; none at the end."""
    plan = plan_of("run.samples_every=300", "run.sample_prompts=[a]", "run.sample_tokens=9")
    bill = make_bill(plan, PRICED, 3.0, sample_s=7.0)
    assert bill.samples_s == pytest.approx(21.0)
    assert bill.seconds == pytest.approx(3021.0) and bill.dollars == pytest.approx(
        2 * 2.5 * 3021 / 3600
    )
    assert ", 21.0 s of it samples of text;" in next(bill_lines(bill, PRICED))
    assert make_bill(plan, PRICED, 3.0, first_step=600, sample_s=7.0).samples_s == 7.0
    assert make_bill(plan, PRICED, 3.0, first_step=2000, sample_s=7.0).samples_s == 0.0
    assert make_bill(plan_of(), PRICED, 3.0, sample_s=7.0).samples_s == 0.0


def test_a_sample_is_a_pass_over_its_prompts_for_each_token():
    """Prompts of 3 tokens and 13 new ones are rows of 16, which the grid can cut; 5 of them are 3 micro-batches."""
    texts = "run.sample_prompts=[abc, abc, abc, abc, abc]"
    plan = plan_of(*layout_overrides("tp1"), "run.samples_every=10", texts, "run.sample_tokens=13")
    rows = with_options(plan, plan.job.with_values(data={"seq_len": row_length(16, plan.job)}))
    once = evaluation_s(rows, 5, H100)
    assert sample_s(plan, 3, H100) == pytest.approx(13 * once)
    # no tokenizer is with built-in tokens: a token has a byte at least
    bill = bill_of(plan, H100, 3.0)
    assert bill.samples_s == pytest.approx(100 * 13 * once) and bill.seconds > 3000.0


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
