"""Deviations: their scales, holes, replicas, and which one is named first."""

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest

from raymega.box import Box
from raymega.verify.compare import (
    ComparedBlock,
    RankResult,
    StepValues,
    compare,
    make_reference,
    relative,
)

LIMIT = 1e-9


def _result(values, *, loss=(4.0, 2.0), offset=0, lr=0.5):
    curve = tuple(StepValues(loss=x, grad_norm=1.0, lr=lr) for x in loss)
    blocks = [
        ComparedBlock(
            step=step, name="w", box=Box(offset=(offset,), shape=(len(row),)), values=np.array(row)
        )
        for step, row in enumerate(values, start=1)
    ]
    return RankResult(curve=curve, blocks=blocks)


REFERENCE = make_reference(_result([[1.0, -3.0], [2.0, 0.0]]))


def test_equal_halves_and_replicas_deviate_by_nothing():
    left, right = _result([[1.0], [2.0]]), _result([[-3.0], [0.0]], offset=1)
    found = compare([left, right, right], REFERENCE, limit=LIMIT)
    assert found.first is None and found.largest.value == 0


def test_tensor_deviation_is_over_its_largest_value_and_the_learning_rates_so_far():
    found = compare([_result([[1.0, -3.0], [2.0, 0.3]])], REFERENCE, limit=LIMIT)
    assert (found.tensor.step, found.tensor.quantity) == (2, "w")
    assert found.tensor.value == pytest.approx(0.3 / (2.0 + 2 * 0.5))


def test_loss_deviation_is_relative_and_the_first_step_is_named():
    found = compare([_result([[1.0, -3.0], [9.0, 0.0]], loss=(4.1, 2.0))], REFERENCE, limit=LIMIT)
    assert found.loss.value == pytest.approx(0.1 / 4.0)
    assert found.first.step == 1 and found.first.quantity == "loss"
    assert found.largest.quantity == "w"


def test_one_wrong_replica_is_seen():
    good, bad = _result([[1.0, -3.0], [2.0, 0.0]]), _result([[1.0, -3.0], [2.0, 1.0]])
    for results in ([good, bad], [bad, good]):
        assert compare(results, REFERENCE, limit=LIMIT).first.quantity == "w"


def test_element_that_no_rank_holds_is_infinitely_off():
    found = compare([_result([[1.0], [2.0]])], REFERENCE, limit=LIMIT)
    assert found.tensor.value == inf and found.first.step == 1


def test_nan_is_infinitely_off():
    found = compare([_result([[1.0, -3.0], [nan, 0.0]], loss=(nan, 2.0))], REFERENCE, limit=LIMIT)
    assert found.loss.value == inf and found.tensor.value == inf
    assert relative(1.0, 0.0) == inf and relative(0.0, 0.0) == 0.0


def test_held_out_loss_is_compared_on_every_rank_with_the_plain_one():
    values = [[1.0, -3.0], [2.0, 0.0]]
    mine = replace(_result(values), eval_losses={"eval_loss": 4.0})
    by_itself = make_reference(mine)
    plain = make_reference(replace(mine, plain_eval_losses={"eval_loss": 5.0}))
    assert compare([mine], by_itself, limit=LIMIT).first is None
    found = compare([mine, replace(mine, eval_losses={"eval_loss": 5.0})], plain, limit=LIMIT)
    assert found.first.quantity == "eval_loss" and found.first.step == 2
    assert found.largest.value == found.eval_loss.value == pytest.approx(0.2)
    # a rank that did not evaluate must not pass, and a job without evaluation has nothing to compare
    assert compare([_result(values)], plain, limit=LIMIT).eval_loss.value == inf
    assert compare([_result(values)], REFERENCE, limit=LIMIT).eval_loss is None


def test_optimizer_state_deviates_relative_to_the_largest_of_its_kind():
    def result(noise, moved=0.0):
        rows = {"w": [1.0], "adam.exp_avg/w": [2.0 + moved], "adam.exp_avg/bias": [noise]}
        blocks = [
            ComparedBlock(step=1, name=name, box=Box(offset=(0,), shape=(1,)), values=np.array(row))
            for name, row in rows.items()
        ]
        return RankResult(curve=(StepValues(loss=1.0, grad_norm=1.0, lr=0.5),), blocks=blocks)

    reference = make_reference(result(1e-18))
    assert compare([result(-1e-17)], reference, limit=LIMIT).first is None
    found = compare([result(1e-18, moved=0.2)], reference, limit=LIMIT).first
    assert found.quantity == "adam.exp_avg/w" and found.value == pytest.approx(0.1)


def test_state_that_stays_zero_deviates_by_nothing_or_infinitely():
    def result(value):
        blocks = [
            ComparedBlock(
                step=1, name=name, box=Box(offset=(0,), shape=(1,)), values=np.array([number])
            )
            for name, number in (("w", 1.0), ("sgd.momentum/w", value))
        ]
        return RankResult(curve=(StepValues(loss=1.0, grad_norm=1.0, lr=0.5),), blocks=blocks)

    reference = make_reference(result(0.0))
    assert compare([result(0.0)], reference, limit=LIMIT).largest.value == 0
    assert compare([result(1e-30)], reference, limit=LIMIT).first.value == inf


def test_a_tensor_deviates_relative_to_its_own_learning_rates():
    result = replace(_result([[0.0], [0.0]]), lr_scales={"w": 4.0})
    found = compare([_result([[0.0], [0.2]])], make_reference(result), limit=LIMIT)
    assert found.tensor.value == pytest.approx(0.2 / (4.0 * 2 * 0.5))


@pytest.mark.parametrize("moment", ["lion.exp_avg", "adam.exp_avg"])
def test_a_weight_that_noise_moves_is_named_and_may_differ_by_so_much(moment):
    def result(bias, weight=1.0, moment=moment):
        rows = {"w": [weight], "bias": [bias], f"{moment}/w": [2.0], f"{moment}/bias": [1e-17]}
        blocks = [
            ComparedBlock(step=1, name=name, box=Box(offset=(0,), shape=(1,)), values=np.array(row))
            for name, row in rows.items()
        ]
        return RankResult(curve=(StepValues(loss=1.0, grad_norm=1.0, lr=0.5),), blocks=blocks)

    reference = make_reference(result(0.5))
    assert reference.undecided == {"bias"}
    assert compare([result(-0.5)], reference, limit=LIMIT).first is None
    assert compare([result(-0.5 - 1e-15)], reference, limit=LIMIT).first is None  # rounding
    assert compare([result(nan)], reference, limit=LIMIT).first.value == inf
    assert compare([result(-0.5, weight=1.1)], reference, limit=LIMIT).first.quantity == "w"
    assert compare([result(-0.6)], reference, limit=LIMIT).first.quantity == "bias"
    others = make_reference(result(0.5, moment="sgd.momentum"))
    assert others.undecided == frozenset()


@pytest.mark.parametrize(
    ("change", "quantity"),
    [
        ({"lr": 0.25}, "lr"),
        ({"tokens": 7}, "tokens"),
        ({"mtp_loss": 3.0}, "mtp_loss"),
        ({"mtp_loss": None}, "mtp_loss"),
        ({"loads": {"1": (3.0, 6.0, 0.5)}}, "expert load of layer 1"),
        ({"loads": {}}, "expert load of layer 1"),
    ],
    ids=str,
)
def test_each_scalar_of_a_step_is_compared(change, quantity):
    step = StepValues(
        loss=4.0, grad_norm=1.0, lr=0.5, tokens=8, mtp_loss=2.0, loads={"1": (4.0, 5.0, 0.5)}
    )
    whole = replace(_result([[1.0], [1.0]]), curve=(step, step))
    reference = make_reference(whole)
    assert compare([whole], reference, limit=LIMIT).first is None
    found = compare(
        [whole, replace(whole, curve=(step, replace(step, **change)))], reference, limit=LIMIT
    )
    assert (found.first.step, found.first.quantity) == (2, quantity)
    assert found.other == found.largest


def test_named_sets_are_compared_by_name():
    losses = {"eval_loss": 4.0, "eval_loss/code": 4.0, "eval_loss/web": 5.0}
    mine = replace(_result([[1.0, -3.0]], loss=(4.0,)), eval_losses=losses)
    reference = make_reference(mine)
    other = replace(mine, eval_losses=losses | {"eval_loss/web": 5.5})
    assert compare([other], reference, limit=LIMIT).first.quantity == "eval_loss/web"


def test_a_run_that_was_resumed_is_compared_from_its_first_step_on():
    resumed = RankResult(
        curve=REFERENCE.curve[1:],
        blocks=[
            ComparedBlock(step=2, name="w", box=Box(offset=(0,), shape=(2,)), values=np.array(row))
            for row in ([2.0, 0.0],)
        ],
        first_step=2,
    )
    found = compare([resumed], REFERENCE, limit=LIMIT)
    assert found.first is None and found.loss.step == 2


def test_a_weight_that_no_gradient_has_reached_yet_is_not_taken_for_undecided():
    """An expert that no token chose in the first step has moments of exactly zero after it."""

    def result(weight):
        blocks = [
            ComparedBlock(step=step, name=name, box=Box(offset=(0,), shape=(1,)), values=np.array([value]))
            for step, moment in ((1, 0.0), (2, 1.0))
            for name, value in (
                ("w", 1.0), ("expert", weight), ("adam.exp_avg/w", 2.0), ("adam.exp_avg/expert", moment),
            )
        ]  # fmt: skip
        curve = (StepValues(loss=1.0, grad_norm=1.0, lr=0.5),) * 2
        return RankResult(curve=curve, blocks=blocks)

    reference = make_reference(result(1.0))
    assert reference.undecided == frozenset()
    assert compare([result(1.1)], reference, limit=LIMIT).first.quantity == "expert"
