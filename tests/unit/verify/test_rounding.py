"""Below float64: the spread of runs on one rank, its own limits, and layouts that are several times as far."""

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest

from raymega.box import Box
from raymega.verify.compare import ComparedBlock, RankResult, StepValues, make_reference
from raymega.verify.rounding import LIMIT_OF_SPREAD, Spread, compare_with_spread

STEP = StepValues(loss=4.0, grad_norm=2.0, lr=0.5, tokens=8)
ROUNDING = 2.0**-8


def _result(*, off=0.0, **changes):
    rows = {
        "layers.1.moe.router.counts": 1.0 if off else 0.0, "layers.0.up.weight": 1.0 + off, "layers.1.up.weight": 3.0, "adam.exp_avg/layers.0.up.weight": 2.0,
        "adam.exp_avg/layers.1.up.weight": 2.0,
    }  # fmt: skip
    blocks = [
        ComparedBlock(step=1, name=name, box=Box(offset=(0,), shape=(4,)), values=np.full(4, value))
        for name, value in rows.items()
    ]
    return RankResult(
        curve=(replace(STEP, **changes),), blocks=blocks, eval_losses={"eval_loss": 4.0}
    )


REFERENCE = make_reference(_result())
SPREAD = Spread(
    distances={
        "loss": ROUNDING, "grad_norm": ROUNDING, "lr": 0.0, "tokens": 0.0, "eval_loss": ROUNDING,
        "layers.*.up.weight": 0.01, "adam.exp_avg/layers.*.up.weight": 0.01,
    },
    rounding=ROUNDING,
)  # fmt: skip


def _compare(**changes):
    return compare_with_spread([_result(**changes)], REFERENCE, SPREAD)


def test_deviations_are_multiples_of_the_spread():
    found = _compare(loss=4.0 * (1 + 3 * ROUNDING), off=0.02)
    assert found.loss.value == pytest.approx(3.0)
    # of 0.02 in a step of 0.5, where one rank has 0.01 of a step
    assert (
        found.tensor.value == pytest.approx(4.0) and found.tensor.quantity == "layers.*.up.weight"
    )
    assert found.first is None and found.largest == found.tensor


@pytest.mark.parametrize(
    ("change", "quantity"),
    [
        ({"off": 0.01 * 0.5 * 1.01 * LIMIT_OF_SPREAD}, "layers.*.up.weight"),
        ({"grad_norm": 2.0 * (1 + 1.1 * LIMIT_OF_SPREAD * ROUNDING)}, "grad_norm"),
        ({"lr": 0.5 + 1e-12}, "lr"),
        ({"tokens": 9}, "tokens"),
        ({"loss": nan}, "loss"),
        ({"off": nan}, "layers.*.up.weight"),
    ],
    ids=str,
)
def test_what_is_farther_than_the_limit_is_named(change, quantity):
    assert _compare(**change).first.quantity == quantity


@pytest.mark.parametrize("num_right", [1, 3])
def test_a_wrong_replica_is_seen_beside_sound_ones(num_right):
    results = [_result()] * num_right + [_result(off=1.0)]
    found = compare_with_spread(results, REFERENCE, SPREAD)
    assert found.first.quantity == "layers.*.up.weight"


def test_an_element_that_no_rank_holds_is_infinitely_far():
    whole = _result()
    for lost in whole.blocks:
        part = replace(whole, blocks=[each for each in whole.blocks if each is not lost])
        assert compare_with_spread([part], REFERENCE, SPREAD).first.value == inf
    halves = [
        replace(each, box=Box(offset=(2,), shape=(2,)), values=each.values[2:])
        for each in whole.blocks
    ]
    assert (
        compare_with_spread([replace(whole, blocks=halves)], REFERENCE, SPREAD).tensor.value == inf
    )


def test_a_held_out_loss_of_the_average_is_bounded_as_any_held_out_loss():
    distances = {**SPREAD.distances, "loss": ROUNDING / 50, "eval_loss": 0.0}
    for name in ("eval_loss/web", "eval_loss of tasks", "eval_ema_loss", "eval_ema_loss/web"):
        wide = replace(SPREAD, distances={**distances, name: ROUNDING})
        found = wide.judge("bfloat16", step=3)
        assert found.first.quantity == found.eval_loss.quantity == name


def test_no_spread_is_less_than_a_part_of_a_rounding():
    lucky = replace(SPREAD, distances={**SPREAD.distances, "loss": 0.0})
    found = compare_with_spread([_result(loss=4.0 * (1 + ROUNDING / 8))], REFERENCE, lucky)
    assert found.loss.value == pytest.approx(1.0)


def test_one_rank_that_is_wrong_itself_does_not_widen_the_limit_of_the_others():
    sound = replace(SPREAD, distances={**SPREAD.distances, "loss": ROUNDING / 50, "eval_loss": 0.0})
    assert sound.judge("bfloat16", step=3).first is None
    wrong = replace(sound, distances={**sound.distances, "layers.*.up.weight": 1.0})
    assert wrong.judge("bfloat16", step=3).first.quantity == "layers.*.up.weight"
    assert replace(sound, rounding=2.0**-24).judge("float32", step=3).first is not None
    other = replace(sound, distances={**sound.distances, "lr": 1e-9})
    assert other.judge("bfloat16", step=3).first.value == inf
