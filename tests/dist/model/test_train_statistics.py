"""Norms by group and activations by block: equal on any layout, and what they say they are."""

from math import sqrt

import pytest
import torch

from raymega.messages import Requests
from raymega.model.layers.transformer_block import TransformerBlock
from raymega.model.stream_block import StreamBlock
from raymega.plan.run_plan import read_plan
from raymega.train.bad_steps import BadStepAction
from raymega.train.build import build_parts
from raymega.train.state import first_state
from raymega.train.step import train_step
from raymega.train.train_statistics import activations_of, norm_metrics
from tests.support.jobs import T5, layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

STEPS = 2


def _train(env, plan_json):
    """Metrics of the last step, and by hand the moments of what a hook sees on this rank."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    state, by_hand = first_state(plan.job.precision), {}
    for _ in range(STEPS):
        by_hand.clear()
        handles = [
            module.register_forward_hook(_server(by_hand, name))
            for name, module in parts.modules[0].named_modules()
            if isinstance(module, TransformerBlock)
        ]
        with activations_of(parts, is_due=True) as activations:
            outcome = train_step(parts, state, Requests(), is_recording=False)
        metrics = activations.metrics(state, outcome) | norm_metrics(parts, outcome)
        state = outcome.state
        for handle in handles:
            handle.remove()
    return (
        metrics,
        outcome.grad_norm,
        {name: torch.cat(parts, 1) for name, parts in by_hand.items()},
    )


def _server(kept, name):
    def keep(block, _args, output):
        own = block.changed(output) if isinstance(block, StreamBlock) else output
        kept.setdefault(name, []).append(own.detach())

    return keep


def _run(layout, *overrides):
    """Rank 0's results, after all ranks were found to agree on the metrics."""
    plan = make_test_plan(*layout_overrides(layout), *overrides)
    results = run_grid(_train, plan.grid, plan.to_json())
    assert all(metrics == results[0][0] for metrics, _, _ in results), "ranks disagree"
    return results[0]


@pytest.fixture(scope="module")
def reference():
    return _run("tp1")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("tp2", ["parallel.sequence_parallel=true"]),
        ("tp4-pp2", []),
        ("dp3", ["schedule.micro_batch_size=3"]),
        ("tp2-pp2-dp2", ["parallel.sharding=optimizer", "parallel.sequence_parallel=true"]),
        ("tp1", ["memory.recompute=full"]),
        ("pp2", ["memory.recompute=full", "memory.recompute_every=2"]),
        ("tp2", ["memory.recompute=selective", "memory.recompute_parts=[attention, norm]"]),
    ],
)
def test_statistics_are_equal_on_any_layout(reference, layout, overrides):
    metrics, _, _ = _run(layout, *overrides)
    assert metrics == pytest.approx(reference[0], rel=1e-9, abs=1e-12)


PACKED = ["data.packing=best_fit", "data.packing_window=64", "data.document_multiple=16"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["cp4", "cp2-pp2", "cp2-dp3"])
def test_statistics_count_rows_that_a_rank_holds_only_padding_of(layout):
    """Of a short document most cp ranks hold padding alone, and of the batch's tail slots nothing."""
    metrics, _, _ = _run(layout, *PACKED)
    assert metrics == pytest.approx(_run("tp1", *PACKED)[0], rel=1e-9, abs=1e-12)


def test_outputs_are_those_of_the_blocks(reference):
    metrics, _, outputs = reference
    assert len(outputs) == 4
    for layer in range(4):
        x = outputs[f"layers.{layer}"]
        assert x.shape == (32, 16, 32)
        assert metrics[f"train/output_mean/{layer}"] == pytest.approx(float(x.mean()), rel=1e-12)
        std = float(x.std(correction=0))
        assert metrics[f"train/output_std/{layer}"] == pytest.approx(std, rel=1e-9)
        assert metrics[f"train/output_max_abs/{layer}"] == float(x.abs().max())


def test_a_block_of_two_streams_shows_the_one_that_it_changes():
    metrics, _, outputs = _run("tp1", *T5)
    for layer, length in enumerate((48, 48, 16, 16)):
        x = outputs[f"layers.{layer}"]
        assert x.shape == (length, 16, 32)
        assert metrics[f"train/output_mean/{layer}"] == pytest.approx(float(x.mean()), rel=1e-9)
        assert metrics[f"train/output_grad_max_abs/{layer}"] > 0
    cut, _, _ = _run("tp2-pp2", *T5, "parallel.sequence_parallel=true", "memory.recompute=full")
    assert cut == pytest.approx(metrics, rel=1e-9, abs=1e-12)


def test_gradient_norms_of_the_groups_make_up_the_whole(reference):
    metrics, grad_norm, _ = reference
    parts = [v for name, v in metrics.items() if name.startswith("train/group_grad_norm/")]
    assert sqrt(sum(part**2 for part in parts)) == pytest.approx(grad_norm, rel=1e-12)
    assert metrics["train/group_weight_norm/final_norm"] == pytest.approx(sqrt(32), rel=0.1)


def test_scale_of_float16_is_not_in_the_statistics(reference):
    metrics, _, _ = _run("tp1", "precision.dtype=float16")
    for name in ("train/output_grad_std/2", "train/output_std/2", "train/group_grad_norm/mlp.up"):
        assert metrics[name] == pytest.approx(reference[0][name], rel=0.05), name


def _train_with_a_passing_fault(env, plan_json):
    """Metrics of a step whose first pass is spoilt on the last rank."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    passes = []

    def spoil(_module, _args, output):
        passes.append(env.rank)
        return output * float("nan") if passes == [1] else None

    next(iter(parts.modules[0].layers.values())).mlp.register_forward_hook(spoil)
    state = first_state(plan.job.precision)
    with activations_of(parts, is_due=True) as activations:
        outcome = train_step(parts, state, Requests(), is_recording=False)
    return outcome.bad_step.action, activations.metrics(state, outcome), outcome.grad_norm


def test_numbers_of_a_pass_that_was_not_used_are_in_no_statistics():
    plan = make_test_plan(*layout_overrides("dp2"))
    for action, metrics, grad_norm in run_grid(
        _train_with_a_passing_fault, plan.grid, plan.to_json()
    ):
        assert action == BadStepAction.SECOND_PASS and grad_norm > 0
        assert metrics == {}
