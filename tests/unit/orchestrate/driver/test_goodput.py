import pytest

from raymega.orchestrate.driver.goodput import GoodputMeter


def test_goodput_is_step_time_over_wall_time():
    meter = GoodputMeter(first_step=0, now_s=10.0)
    meter.add(2.0)
    meter.add(3.0)
    assert meter.goodput(20.0) == pytest.approx(0.5)
    assert meter.wall_s(20.0) == 10.0


def test_goodput_counts_a_step_that_was_done_again_once():
    meter = GoodputMeter(first_step=4, now_s=0.0)
    for seconds in (1.0, 1.0, 1.0):
        meter.add(seconds)
    meter.rewind(5)
    assert meter.goodput(10.0) == pytest.approx(0.1)
    meter.add(1.0)
    assert meter.goodput(10.0) == pytest.approx(0.2)


def test_goodput_goes_back_behind_its_first_step():
    meter = GoodputMeter(first_step=4, now_s=0.0)
    meter.add(1.0)
    meter.rewind(2)
    for seconds in (1.0, 1.0):
        meter.add(seconds)
    meter.rewind(3)
    assert meter.goodput(10.0) == pytest.approx(0.1)


def test_goodput_is_zero_before_time_has_passed():
    assert GoodputMeter(first_step=0, now_s=5.0).goodput(5.0) == 0.0
