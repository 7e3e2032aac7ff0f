"""One step on one rank: what a step that is left out, overflows or is done twice leaves behind."""

import math
from dataclasses import replace

import pytest
import torch

from raymega.messages import Requests
from raymega.parallel.comm.process_groups import groups_of_plan
from raymega.train.bad_steps import BadStepAction
from raymega.train.build import build_parts
from raymega.train.state import first_state
from raymega.train.step import train_step
from raymega.train.train_statistics import activations_of
from tests.support.jobs import layout_overrides, make_test_plan

SMALL = (
    *layout_overrides("tp1"),
    "model.num_layers=2",
    "data.global_batch_size=4",
    "optimizer.lr_warmup_steps=0",
)
EXPERTS = (
    "model.moe.num_experts=4", "model.moe.intermediate_size=16", "model.moe.expert_bias=true",
    "model.moe.expert_bias_update_rate=0.5", "model.moe.load_balancing_type=global",
    "model.moe.router_aux_loss_coef=0.1",
)  # fmt: skip
AHEAD = ("model.num_nextn_predict_layers=1",)
SPIKES = ("elastic.spike_window=4", "elastic.spike_grad_norm=3.0")


class Run:
    """A run of one rank whose backward can be spoiled."""

    def __init__(self, *overrides):
        plan = make_test_plan(*SMALL, *overrides)
        groups = groups_of_plan(plan, 0, timeout_s=60)
        self.parts = build_parts(plan, rank=0, groups=groups, device=torch.device("cpu"))
        self.state = first_state(plan.job.precision)
        self._factor, self._passes = 1.0, 0
        next(iter(self.parts.modules[0].layers.values())).mlp.register_forward_hook(self._spoil)

    def _spoil(self, _module, _args, output):
        if self._passes and output.requires_grad:
            self._passes -= 1
            factor = self._factor
            output.register_hook(lambda gradient: gradient * factor)

    def step(self, *, factor=1.0, passes=0):
        """A step; in its first ``passes`` micro-batches a gradient is multiplied by ``factor``."""
        self._factor, self._passes = factor, passes
        outcome = train_step(self.parts, self.state, Requests(), is_recording=False)
        self.state, self._passes = outcome.state, 0
        return outcome

    def routing(self):
        """The routers' bias and counts, by layer."""
        held = self.parts.routers.held.items()
        return {layer: (r.bias.detach().clone(), r.counts.detach().clone()) for layer, r in held}


@pytest.mark.parametrize(
    "overrides",
    [("elastic.on_nan=skip",), ("precision.dtype=float16", "precision.loss_scale=64")],
    ids=["left-out", "overflow"],
)
def test_experts_bias_and_counts_move_with_the_weights_alone(overrides):
    """By rate * sign(mean load - load) (Wang et al. 2024, algorithm 1), in steps that update weights."""
    run = Run(*EXPERTS, *overrides)
    for number, is_bad in enumerate((False, True, True, False)):
        before = run.routing()
        outcome = run.step(factor=math.inf, passes=1000 if is_bad else 0)
        assert outcome.is_skipped == is_bad, number
        for layer, (bias, counts) in run.routing().items():
            old_bias, old_counts = before[layer]
            load = outcome.loads[layer].counts
            if is_bad:
                assert torch.equal(bias, old_bias) and torch.equal(counts, old_counts)
                continue
            assert load.sum() == 2 * outcome.tokens
            torch.testing.assert_close(counts, load.to(counts.dtype), rtol=0, atol=0)
            moved = 0.5 * (load.mean() - load).sign()
            torch.testing.assert_close(bias - old_bias, moved.to(bias.dtype), rtol=0, atol=0)


def test_mtp_loss_of_a_step_that_is_done_twice_counts_once():
    calm, spoiled = Run(*AHEAD, *SPIKES), Run(*AHEAD, *SPIKES)
    for number in range(6):
        wanted = calm.step()
        found = spoiled.step(factor=1e6, passes=number == 4)
        assert (found.bad_step is not None) == (number == 4)
        if found.bad_step:
            assert found.bad_step.action == BadStepAction.SECOND_PASS.value
        assert (found.loss, found.mtp_loss) == (wanted.loss, wanted.mtp_loss), number


def test_mtp_loss_after_a_step_that_was_left_out_is_that_step_s_own():
    """The search for the first NaN is one more pass, whose losses are nobody's."""
    run, other = (Run(*AHEAD, "elastic.on_nan=skip") for _ in range(2))
    run.step()
    assert run.step(factor=math.nan, passes=1000).bad_step.action == BadStepAction.SKIP.value
    other.step()
    other.state = replace(other.state, samples=run.state.samples)
    found, wanted = run.step(), other.step()
    assert (found.loss, found.mtp_loss) == (wanted.loss, wanted.mtp_loss)


PAIRS = (
    "data.packing=best_fit", "data.document_multiple=8", "model.moe={}", "run.eval_samples=0", "data.loss_on=all",
)  # fmt: skip


def test_gradients_of_activations_are_those_of_the_mean_over_pairs():
    """By hand: of the sum of losses, which autograd gives, divided by the pairs and not by the labels."""
    run = Run("preference.loss_type=orpo", *PAIRS)
    plan, parts = run.parts.plan, run.parts
    last, seen = str(plan.job.model.num_layers - 1), []
    parts.modules[0].layers[last].register_full_backward_hook(
        lambda _module, _inputs, outputs: seen.append(outputs[0].abs().max())
    )
    before = run.state
    with activations_of(parts, is_due=True) as activations:
        outcome = run.step()
    batches = parts.loader.micro_batches(parts.plan.batch_at(0), 0)
    pairs = sum(int(batch.pairs.is_counted.sum()) for batch in batches)
    assert outcome.divisor == pairs < outcome.tokens
    found = activations.metrics(before, outcome)[f"train/output_grad_max_abs/{last}"]
    assert found == pytest.approx(float(max(seen)) / pairs, rel=1e-12)


def test_activations_are_those_of_training_and_not_of_the_reference():
    """The pass under the adapters has no dropout, so its outputs differ."""
    run = Run("preference.loss_type=sigmoid", "model.lora.r=4", "model.hidden_dropout=0.5", *PAIRS)
    module, seen = run.parts.modules[0], {True: [], False: []}
    module.layers["0"].register_forward_hook(
        lambda _module, _args, output: seen[module.training].append(output.detach())
    )
    before = run.state
    with activations_of(run.parts, is_due=True) as activations:
        outcome = run.step()
    trained, reference = (torch.cat(outputs, 1) for outputs in (seen[True], seen[False]))
    assert trained.shape == reference.shape and trained.mean() != reference.mean()
    found = activations.metrics(before, outcome)["train/output_mean/0"]
    assert found == pytest.approx(float(trained.mean()), rel=1e-9)
