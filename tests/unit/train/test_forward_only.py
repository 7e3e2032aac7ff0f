"""The reference of a step: the frozen weights, without adapters and without dropout."""

from types import SimpleNamespace

import torch

from raymega.messages import Requests
from raymega.parallel.context_parallel.context import no_context
from raymega.train.build import build_parts
from raymega.train.forward_only import no_reference, with_baseline
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE

PAIRS = (
    "data.packing=best_fit", "data.document_multiple=8", "preference.loss_type=sigmoid", "model.lora.r=4",
    "model.hidden_dropout=0.3", "run.eval_samples=0", "optimizer.lr=1e-1", "optimizer.lr_warmup_steps=0",
)  # fmt: skip


def _references(parts):
    batches = parts.loader.micro_batches(parts.plan.batch_at(0), 0)
    return [batch.pairs.reference for batch in parts.add_reference(batches)]


def test_the_reference_is_the_same_after_steps_and_in_each_pass():
    parts = build_parts(
        make_test_plan(*layout_overrides("tp1"), *PAIRS),
        rank=0,
        groups=ALONE,
        device=torch.device("cpu"),
    )
    before = _references(parts)
    outcome = train_step(parts, TrainState(), Requests(), is_recording=False)
    train_step(parts, outcome.state, Requests(), is_recording=False)
    after = _references(parts)
    assert all(map(torch.equal, before, after))
    assert all((each <= 0).all() and (each < 0).any() for each in before)
    assert not any(module.adapters.is_off for module in parts.modules)


def test_a_rank_whose_stages_have_no_weights_shares_the_estimate_of_the_divergence():
    stage = SimpleNamespace(context=no_context(), parameters=lambda: iter(()))
    forward = SimpleNamespace(modules=(stage,), run=lambda *_: [])
    add = with_baseline(no_reference, forward, ALONE.world, 0, torch.device("cpu"))
    batch = SimpleNamespace(pairs=None, rows=SimpleNamespace(context=None))
    assert add([batch]) == [batch]
