"""Predicted seconds of an evaluation: forwards of a pipeline that fills and drains."""

import pytest

from raymega.plan.hardware.catalog import CATALOGUE
from raymega.planner.cost.evaluation_time import evaluation_s
from raymega.planner.cost.step_time import stage_times
from tests.support.jobs import layout_overrides, make_test_plan

H100 = CATALOGUE["h100"]


def test_one_rank_takes_a_forward_a_micro_batch():
    plan = make_test_plan(*layout_overrides("tp1"))
    (stage,) = stage_times(plan, H100)
    rows = 7 * plan.batch.micro_batch_size
    assert evaluation_s(plan, rows, H100) == pytest.approx(7 * stage.forward_s)
    assert evaluation_s(plan, rows - 1, H100) == evaluation_s(plan, rows, H100)


def test_a_pipeline_fills_once_for_each_exchange_and_dp_shares_the_rows():
    plan = make_test_plan(*layout_overrides("pp2"))
    at_once = plan.batch.micro_batch_size * 4 * 2
    one, two = (evaluation_s(plan, number * at_once, H100) for number in (1, 2))
    assert two == pytest.approx(2 * one)
    # eight forwards of a stage, and one more until the last stage has begun
    times = [stage.forward_s for stage in stage_times(plan, H100)]
    assert one > 8 * max(times) + min(times)
    halved = make_test_plan(*layout_overrides("pp2-dp2"))
    assert evaluation_s(halved, 2 * at_once, H100) == pytest.approx(one, rel=0.2)
