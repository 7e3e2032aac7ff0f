"""Tasks that the training ranks evaluate: training keeps its bits, and scores are those of every layout."""

from types import SimpleNamespace

import numpy as np
import pytest

from raymega.evaluate.requests import Request, pack_requests, unpack_scores
from raymega.evaluate.training_entry import make_evaluator
from raymega.messages import EntryOutput, Requests
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist
STEPS, LIMIT = 2, 1e-9
EXPERTS = ("model.moe.num_experts=4",)
LAYOUTS = {
    "tp2-sp-pp2": (),
    "cp2-dp2": (),
    "dp2": ("parallel.sharding=parameters",),
    "pp2-dp2": ("schedule.name=interleaved", "schedule.chunks=2"),
    "tp2": ("memory.recompute=full",),
}
DROPOUT = ("model.hidden_dropout=0.1",)


def _requests():
    """Ragged requests, more than one micro-batch of rows."""
    rng = np.random.default_rng(0)
    lengths = [2, 17, *rng.integers(3, 16, 14).tolist()]
    return [
        Request(tokens=rng.integers(0, 50, n), num_targets=int(rng.integers(1, n))) for n in lengths
    ]


def _train(env, plan_json, is_scoring):
    plan, heard = read_plan(plan_json), []
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    start = SimpleNamespace(rank=env.rank, entry_input=pack_requests(_requests()))
    channel = SimpleNamespace(report=heard.append)
    evaluate = make_evaluator(parts, start, channel)
    state, curve = TrainState(), []
    for _ in range(STEPS):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.append((outcome.loss, outcome.grad_norm))
        if is_scoring:
            evaluate(state.step)
    weights = [block.values.cpu().numpy().tobytes() for block in parts.optimizer.blocks()]
    outputs = [each for each in heard if isinstance(each, EntryOutput)]
    return curve, weights, [(each.step, each.data) for each in outputs]


def _run(layout, *overrides, is_scoring):
    plan = make_test_plan(
        *layout_overrides(layout), "precision.dtype=float64", "run.eval_samples=0",
        "data.seq_len=16", *overrides,
    )  # fmt: skip
    return run_grid(_train, plan.grid, plan.to_json(), is_scoring)


def _scores(results):
    """Log-probabilities after each step; rank 0 alone reports them."""
    (first, *others) = [outputs for _, _, outputs in results]
    assert [step for step, _ in first] == [1, 2] and not any(others)
    found = [unpack_scores(data, _requests()) for _, data in first]
    return [np.concatenate([each.log_probs for each in scores]) for scores in found]


@pytest.fixture(scope="module")
def on_one_rank():
    return _scores(_run("tp1", is_scoring=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_keeps_its_bits_and_every_layout_has_the_scores(layout, on_one_rank):
    scored = _run(layout, *LAYOUTS[layout], is_scoring=True)
    plain = _run(layout, *LAYOUTS[layout], is_scoring=False)
    for (curve, weights, _), (other, others, _) in zip(scored, plain, strict=True):
        assert curve == other and weights == others
    found = _scores(scored)
    assert not np.allclose(found[0], found[1], atol=1e-4), "the weights moved between the steps"
    np.testing.assert_allclose(found, on_one_rank, rtol=LIMIT, atol=LIMIT)


@pytest.mark.wide
@pytest.mark.parametrize("more", [DROPOUT, EXPERTS], ids=["dropout", "experts"])
def test_training_with_dropout_or_experts_keeps_its_bits(more):
    scored, plain = (_run("dp2", *more, is_scoring=on) for on in (True, False))
    for (curve, weights, _), (other, others, _) in zip(scored, plain, strict=True):
        assert curve == other and weights == others
    _scores(scored)
