"""Whole training steps in their modes: batch ramp, float16 with overflows, on several layouts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from raymega.messages import Requests
from raymega.optim.loss_scale import LossScale
from raymega.plan.grid import Grid
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.state import first_state
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_alone, run_grid

pytestmark = pytest.mark.dist

RAMP = "data.batch_ramp=[{until_samples: 10, global_batch_size: 4}, {until_samples: 24, global_batch_size: 7}]"


def _train(env, plan_json, steps, changes):
    """Outcome of each step; ``changes`` are of the first state's fields."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    state = replace(first_state(plan.job.precision), **changes)
    outcomes = []
    for _ in range(steps):
        outcomes.append(train_step(parts, state, Requests(), is_recording=False))
        state = outcomes[-1].state
    return [replace(outcome, events=()) for outcome in outcomes]


def _run(layout, *overrides, steps=6, **changes):
    """The outcomes, after all ranks were found to agree on them."""
    plan = make_test_plan(*layout_overrides(layout), *overrides)
    first, *others = run_grid(_train, plan.grid, plan.to_json(), steps, changes)
    assert {repr(other) for other in others} <= {repr(first)}, "ranks disagree"
    return first


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["dp3", "tp2-pp2-dp2"])
def test_ramp_trains_the_same_run_on_any_layout(layout):
    wanted, found = _run("tp1", RAMP), _run(layout, RAMP)
    assert [outcome.samples for outcome in wanted] == [4, 4, 4, 7, 7, 16]
    exact = {"losses": (), "grad_norms": ()}  # to rounding, below
    assert [replace(o.state, **exact) for o in found] == [replace(o.state, **exact) for o in wanted]
    for name in exact:
        usual = [getattr(outcomes[-1].state, name) for outcomes in (found, wanted)]
        np.testing.assert_allclose(*usual, rtol=1e-9)
    np.testing.assert_allclose(
        [(o.loss, o.grad_norm) for o in found], [(o.loss, o.grad_norm) for o in wanted], rtol=1e-9
    )


HALF = ("precision.dtype=float16", "data.global_batch_size=8")


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2-dp2", "tp2-pp2-dp2"])
def test_overflow_skips_the_step_on_every_rank_alike(layout):
    """A scale that overflows at the logits: the first is forgiven, each later one halves it."""
    scale = LossScale(factor=2.0**25)
    outcomes = _run(layout, *HALF, loss_scale=scale, steps=3)
    assert [outcome.state.loss_scale.factor for outcome in outcomes] == [2.0**25, 2.0**24, 2.0**23]
    last = outcomes[-1].state
    assert (last.step, last.skipped_steps, last.updates, last.samples) == (3, 3, 0, 24)
    assert len({outcome.lr for outcome in outcomes}) == 1, "the schedule went on"


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp2", "pp2-dp2"])
def test_float16_trains_like_float32(layout):
    half = _run(layout, *HALF, steps=8)
    wide = _run("tp1", "precision.dtype=float32", "data.global_batch_size=8", steps=8)
    assert half[-1].state.skipped_steps == 0
    np.testing.assert_allclose([o.loss for o in half], [o.loss for o in wide], rtol=2e-3)
    np.testing.assert_allclose([o.grad_norm for o in half], [o.grad_norm for o in wide], rtol=2e-2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp1", "dp2", "tp2-sp"])
def test_bias_gradients_that_float16_cannot_hold_are_no_overflow(layout):
    """A bias's gradient is a sum over tokens; ranks that cut positions would have smaller terms."""
    job = (
        *HALF, "data.global_batch_size=9", "schedule.micro_batch_size=1", "model.family=gpt2",
        "model.num_kv_heads=num_heads", "model.tie_word_embeddings=false", "model.vocab_size=70",
        "precision.loss_scale_window=2",
    )  # fmt: skip
    outcomes = _run(layout, *job, loss_scale=LossScale(factor=2.0**16), steps=4)
    factors = [outcome.state.loss_scale.factor for outcome in outcomes]
    assert factors == [2.0**16, 2.0**17, 2.0**17, 2.0**18]
    assert outcomes[-1].state.skipped_steps == 0


def _state_after_a_skipped_step():
    """Whether weights and moments kept their bits; and that the next good step is the first."""
    from raymega.parallel.comm.process_groups import build_groups

    plan = make_test_plan(*layout_overrides("tp1"), *HALF)
    groups = build_groups(Grid(), 0, timeout_s=10)
    parts = build_parts(plan, rank=0, groups=groups, device=torch.device("cpu"))

    def values(parts=parts):
        return [block.values.clone() for block in parts.optimizer.blocks()]

    state = replace(first_state(plan.job.precision), loss_scale=LossScale(factor=2.0**25))
    before = values()
    outcome = train_step(parts, state, Requests(), is_recording=False)
    kept = all(torch.equal(a, b) for a, b in zip(before, values(), strict=True))
    good = replace(outcome.state, samples=0, loss_scale=LossScale(factor=2.0**10))
    after_skip = train_step(parts, good, Requests(), is_recording=False)
    fresh = build_parts(plan, rank=0, groups=groups, device=torch.device("cpu"))
    begin = replace(first_state(plan.job.precision), loss_scale=LossScale(factor=2.0**10))
    first = train_step(fresh, begin, Requests(), is_recording=False)
    same = [torch.equal(a, b) for a, b in zip(values(), values(fresh), strict=True)]
    return kept, all(same), (after_skip.lr, after_skip.loss) == (first.lr, first.loss)


def test_skipped_step_touches_nothing():
    assert run_alone(_state_after_a_skipped_step) == (True, True, True)


def _train_with_scales(scales):
    from raymega.parallel.comm.process_groups import build_groups

    plan = make_test_plan(
        *layout_overrides("tp1"), "precision.dtype=float32", "schedule.micro_batch_size=2"
    )
    results = []
    for scale in scales:
        groups = build_groups(Grid(), 0, timeout_s=10)
        parts = build_parts(plan, rank=0, groups=groups, device=torch.device("cpu"))
        state = replace(first_state(plan.job.precision), loss_scale=scale)
        outcome = train_step(parts, state, Requests(), is_recording=False)
        results.append(
            (
                outcome.loss,
                outcome.grad_norm,
                [block.values.clone() for block in parts.optimizer.blocks()],
            )
        )
    return results


def test_scale_is_divided_out_to_the_last_bit():
    """In float32, where a power of two changes no bit: seed 1 and a scale give the same step."""
    plain, scaled = run_alone(_train_with_scales, [None, LossScale(factor=2.0**12)])
    assert plain[:2] == scaled[:2]
    assert all(torch.equal(a, b) for a, b in zip(plain[2], scaled[2], strict=True))


SGD = (
    "optimizer.name=sgd",
    "optimizer.lr=0.3",
    "optimizer.embedding_lr=0.15",
    "optimizer.norm_lr=0.6",
    "optimizer.is_embedding_decayed=false",
    "optimizer.lr_schedule=inverse_sqrt",
    "optimizer.lr_warmup_steps=2",
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp2-pp2", "pp2-dp2"])
def test_sgd_with_groups_trains_the_same_run_on_any_layout(layout):
    wanted, found = _run("tp1", *SGD), _run(layout, *SGD, "parallel.sharding=optimizer")
    np.testing.assert_allclose(
        [(o.loss, o.grad_norm) for o in found], [(o.loss, o.grad_norm) for o in wanted], rtol=1e-9
    )
