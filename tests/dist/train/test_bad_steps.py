"""A step with bad numbers on real ranks: done once more, left out, or undone; a passing fault leaves no trace."""

import math

import numpy as np
import pytest
import torch

from raymega.errors import NumericsError, RollbackError
from raymega.messages import Requests
from raymega.plan.run_plan import read_plan
from raymega.train.bad_steps import BadStepAction
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

STEPS, BAD_STEP = 6, 5
SPIKES = ("elastic.spike_window=4", "elastic.spike_grad_norm=3.0")


def _once(rank, at, factor):
    """A forward hook that spoils one output, or its gradient, in one pass of rank ``at``, and never again."""
    calls = {"left": 1, "armed": False}

    def spoil(_module, _args, output):
        if rank != at or not calls["armed"] or not calls["left"]:
            return None
        calls["left"] = 0
        if math.isnan(factor):
            return output * factor
        output.register_hook(lambda gradient: gradient * factor)
        return None

    return calls, spoil


def _curve(env, plan_json, at, factor):
    """Loss and norm of each step, rulings by step, and the weights."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    calls, spoil = _once(env.rank, at, factor)
    next(iter(parts.modules[0].layers.values())).mlp.register_forward_hook(spoil)
    state, curve, actions = TrainState(), [], {}
    for number in range(1, STEPS + 1):
        calls["armed"] = number == BAD_STEP
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.append((outcome.loss, outcome.grad_norm))
        if outcome.bad_step:
            actions[outcome.bad_step.step] = outcome.bad_step.action
    assert at < 0 or env.rank != at or not calls["left"], "the fault did not happen"
    return curve, actions, [block.values.numpy().copy() for block in parts.optimizer.blocks()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp2-pp2", "dp2"])
def test_passing_fault_of_one_rank_leaves_the_run_bit_for_bit_as_it_was(layout):
    batch = f"data.global_batch_size={8 if 'dp2' in layout else 4}"
    plan = make_test_plan(*layout_overrides(layout), *SPIKES, batch, "optimizer.lr_warmup_steps=0")
    calm = run_grid(_curve, plan.grid, plan.to_json(), -1, 1.0)
    for factor in (math.nan, 1e6):
        found = run_grid(_curve, plan.grid, plan.to_json(), plan.grid.world_size - 1, factor)
        assert {str(actions) for _, actions, _ in found} == {
            str({BAD_STEP: BadStepAction.SECOND_PASS.value})
        }
        for (curve, _, weights), (wanted, none, wanted_weights) in zip(found, calm, strict=True):
            assert none == {} and curve == wanted
            for mine, other in zip(weights, wanted_weights, strict=True):
                np.testing.assert_array_equal(mine, other)


def _bad_batch(env, plan_json):
    """Steps over data of which one batch is always bad: what each step did, and where it ended."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    block = next(iter(parts.modules[0].layers.values()))
    size, state, seen = plan.batch.global_batch_size, TrainState(), []

    def spoil(_module, _args, output):
        return output * math.nan if env.rank == 1 and state.samples == 2 * size else None

    block.mlp.register_forward_hook(spoil)
    for _ in range(4):
        before = [block.values.clone() for block in parts.optimizer.blocks()]
        try:
            outcome = train_step(parts, state, Requests(), is_recording=False)
        except NumericsError as error:
            kept = all(map(torch.equal, before, (b.values for b in parts.optimizer.blocks())))
            return seen, type(error).__name__, getattr(error, "next_sample", -1), str(error), kept
        state = outcome.state
        kept = all(map(torch.equal, before, (b.values for b in parts.optimizer.blocks())))
        seen.append(
            (outcome.bad_step and outcome.bad_step.action, kept, state.samples, state.updates)
        )
    return seen, "", -1, "", True


def test_batch_that_is_bad_again_is_left_out_undone_or_the_end():
    def run(policy):
        plan = make_test_plan(
            *layout_overrides("dp2"), "data.global_batch_size=8", f"elastic.on_nan={policy}"
        )
        results = run_grid(_bad_batch, plan.grid, plan.to_json())
        assert results[0] == results[1]
        return results[0]

    seen, *_ = run("skip")
    assert seen == [
        (None, False, 8, 1), (None, False, 16, 2), (BadStepAction.SKIP, True, 24, 2), (None, False, 32, 3),
    ]  # fmt: skip
    for policy, error, next_sample in (
        ("rollback", RollbackError, 24), ("rerun", NumericsError, -1), ("stop", NumericsError, -1),
    ):  # fmt: skip
        seen, name, at, text, kept = run(policy)
        assert (len(seen), name, at, kept) == (2, error.__name__, next_sample, True)
        assert "step 3: loss=" in text and "rank 1 (tp 0, cp 0, pp 0, dp 1)" in text


BALANCED = (
    "model.moe.num_experts=4", "model.moe.expert_bias=true", "model.moe.expert_bias_update_rate=0.01", "model.moe.load_balancing_type=global",
    "model.moe.router_aux_loss_coef=0.1",
)  # fmt: skip


def _loads_around_bad_batch(env, plan_json):
    """Of each step and layer: choices over what its tokens make, and whether all sums are numbers."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    size, state, seen = plan.batch.global_batch_size, TrainState(), []

    def spoil(_module, _args, output):
        return output * math.nan if env.rank == 1 and state.samples == size else None

    next(iter(parts.modules[0].layers.values())).mlp.register_forward_hook(spoil)
    for _ in range(3):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        choices = outcome.tokens * plan.job.model.moe.top_k
        seen.append(
            [(float(load.counts.sum()) / choices, math.isfinite(load.entropy + load.balance))
             for load in outcome.loads.values()]
        )  # fmt: skip
    return seen


def test_routing_of_batch_that_is_left_out_is_in_no_later_step():
    plan = make_test_plan(
        *layout_overrides("dp2-ep2"), *BALANCED, "data.global_batch_size=8", "elastic.on_nan=skip"
    )
    for before, _, after in run_grid(_loads_around_bad_batch, plan.grid, plan.to_json()):
        assert set(before) == set(after) == {(1.0, True)}
