"""Named validation sets have their own loss, the same on every layout and whatever other sets there are."""

import pytest

from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.forward_backward import evaluate
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

A, B = "{name: a, path: synthetic:a}", "{name: b, path: synthetic:b, split: train}"


def _evaluated(env, plan_json):
    plan = read_plan(plan_json)
    return evaluate(build_parts(plan, rank=env.rank, groups=env.groups, device=env.device))


def _metrics(layout, *overrides):
    """Of all ranks, which have the same."""
    plan = make_test_plan(*layout_overrides(layout), "run.eval_samples=6", *overrides)
    first, *others = run_grid(_evaluated, plan.grid, plan.to_json())
    assert all(other == first for other in others)
    return first


def test_sets_are_independent_of_one_another_and_of_the_layout():
    both = _metrics("pp2-dp2", f"data.validation=[{A}, {B}]")
    alone = _metrics("tp1", f"data.validation=[{B}]")
    assert both.keys() == {
        "eval/loss", "eval/perplexity", "eval/set_loss/a", "eval/set_perplexity/a",
        "eval/set_loss/b", "eval/set_perplexity/b",
    }  # fmt: skip
    assert both["eval/loss"] == both["eval/set_loss/a"] != both["eval/set_loss/b"]
    assert both["eval/set_loss/b"] == pytest.approx(alone["eval/set_loss/b"], rel=1e-5)
    # the loss of a set is that of a run whose only dataset it is
    plain = _metrics("tp1", "data.path=synthetic:a")
    assert both["eval/set_loss/a"] == pytest.approx(plain["eval/loss"], rel=1e-5)
