"""Mistakes that other systems made in silence, a test each: what they had wrong is the name."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from raymega.data.order import RowOrder
from raymega.data.rows import one_shard
from raymega.messages import Requests
from raymega.optim.clip import local_norm_sq
from raymega.parallel.comm.process_groups import Group, build_groups
from raymega.plan.batch import make_batch
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid
from tests.support.tensor_watch import TensorWatch
from tests.support.training import assert_same_run, train

pytestmark = pytest.mark.dist

TIED_GPT2 = ("model.family=gpt2", "model.num_kv_heads=num_heads")
SHARDED = ("parallel.sharding=optimizer",)


def _build(env, plan_json):
    return build_parts(read_plan(plan_json), rank=env.rank, groups=env.groups, device=env.device)


def _on_ranks(fn, *overrides, args=()):
    """``fn(env, plan as JSON, *args)`` on every rank of the plan's grid."""
    plan = make_test_plan(*overrides)
    return run_grid(fn, plan.grid, plan.to_json(), *args)


def _steps(parts, num):
    """``num`` steps: (loss, gradient norm) of each."""
    state, curve = TrainState(), []
    for _ in range(num):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.append((outcome.loss, outcome.grad_norm))
    return curve


def _parameters(parts):
    return [param for module in parts.modules for param in module.parameters()]


# Loss divided by local token counts.


class _OneToken:
    """A loader of which a single token counts in the whole step: the sixth of sample 3."""

    def __init__(self, loader):
        self._loader = loader

    def micro_batches(self, batch, first_sample):
        masks = [
            (micro_batch, self._mask(micro_batch, first_sample))
            for micro_batch in self._loader.micro_batches(batch, first_sample)
        ]
        return [
            replace(micro_batch, mask=mask, num_counted=int(mask.sum()))
            for micro_batch, mask in masks
        ]

    def _mask(self, micro_batch, first_sample):
        is_sample = micro_batch.samples[:, None] == first_sample + 3
        return (is_sample & (micro_batch.rows.positions == 5)).to(micro_batch.mask)


def _train_on_one_token(env, plan_json):
    parts = _build(env, plan_json)
    return _steps(replace(parts, loader=_OneToken(parts.loader)), 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["dp2", "dp4", "tp2-pp2-dp2-sp", "cp2", "cp4", "cp2-dp2"])
def test_one_unmasked_token_gives_equal_losses_and_gradients_on_every_grid(layout):
    (wanted,) = _on_ranks(_train_on_one_token, *layout_overrides("tp1"))
    for curve in _on_ranks(_train_on_one_token, *layout_overrides(layout)):
        np.testing.assert_allclose(curve, wanted, rtol=1e-9)


# What several ranks hold, or one of them alone, wrongly tagged in the gradient norm.


def _first_step(env, plan_json):
    return _steps(_build(env, plan_json), 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("job", [TIED_GPT2, ("model.num_kv_heads=1",)], ids=["biases", "shared-kv"])
@pytest.mark.parametrize("layout", ["tp2", "tp2-sp"])
def test_gradient_norm_counts_whole_and_cut_parameters_once_each(layout, job):
    (wanted,) = _on_ranks(_first_step, *job, *layout_overrides("tp1"))
    for found in _on_ranks(_first_step, *job, *layout_overrides(layout)):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


# Gradients of a tied embedding mixed with other shards.


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["pp2-dp2", "pp4-dp2", "tp2-pp2-dp2-sp"])
def test_tied_embedding_on_two_stages_trains_as_one_with_a_sharded_optimizer(layout):
    reference = train([*TIED_GPT2, *layout_overrides("tp1")], steps=2)
    assert_same_run([*TIED_GPT2, *layout_overrides(layout), *SHARDED], reference)


# Gradients of norms and biases not summed over tp.


def _replicated_bits(env, plan_json):
    """After some steps: the values of every parameter that all tp ranks hold whole."""
    parts = _build(env, plan_json)
    _steps(parts, 4)
    parts.weights.start_gather()
    parts.weights.wait_for_all()
    return {
        param.spec.name: param.detach().clone()
        for param in _parameters(parts)
        if param.spec.pieces[0].tensor.tp_dim < 0
    }


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [(), SHARDED], ids=["none", "sharded"])
def test_replicas_are_equal_to_the_bit_after_steps_with_sequence_parallelism(options):
    job = (*TIED_GPT2, *layout_overrides("tp4-dp2-sp"), *options)
    first, *others = _on_ranks(_replicated_bits, *job)
    assert len(first) > 10
    for other in others:
        for name, values in first.items():
            assert torch.equal(values, other[name]), name


# Logits gathered for a loss that works on slices.

VOCABULARY = 1200, 1280  # without padding, and with it


def _watch_steps(env, plan_json):
    parts = _build(env, plan_json)
    with TensorWatch() as seen:
        _steps(parts, 2)
    return seen.columns, seen.elements, seen.owners


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layout", "is_whole"), [("tp1", True), ("tp2", False), ("tp2-sp", False)])
def test_no_rank_makes_or_sends_logits_of_the_whole_vocabulary(layout, is_whole):
    size, multiple = VOCABULARY
    job = (
        f"model.vocab_size={size}",
        f"model.make_vocab_size_divisible_by={multiple}",
        *layout_overrides(layout),
    )
    plan = make_test_plan(*job)
    logits = plan.batch.micro_batch_size * plan.job.data.seq_len * size
    for columns, elements, owners in run_grid(_watch_steps, plan.grid, plan.to_json()):
        assert (not columns.isdisjoint(VOCABULARY), elements >= logits) == (is_whole, is_whole)
        assert is_whole or "c10d" in owners, "collectives are operators too"


# Label smoothing on slice statistics.


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp2", "tp4-sp"])
def test_label_smoothing_is_over_the_whole_vocabulary(layout):
    job = ("model.label_smoothing=0.2", "model.vocab_size=300")
    assert_same_run(
        [*job, *layout_overrides(layout)], train([*job, *layout_overrides("tp1")], steps=2)
    )


# Groups taken from globals, not from the grid that was handed over.


def _train_on_two_grids(env, plan_json, other_json):
    """Steps on two grids in turn, in one process; the curve of each."""
    plan, other = read_plan(plan_json), read_plan(other_json)
    groups = build_groups(other.grid, env.rank, timeout_s=100.0)
    a = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    b = build_parts(other, rank=env.rank, groups=groups, device=env.device)
    states, curves = [TrainState(), TrainState()], [[], []]
    for _ in range(2):
        for place, parts in enumerate((a, b)):
            outcome = train_step(parts, states[place], Requests(), is_recording=False)
            states[place] = outcome.state
            curves[place].append((outcome.loss, outcome.grad_norm, outcome.mtp_loss or 0.0))
    return curves


def test_two_grids_in_one_process_do_not_disturb_each_other():
    plan = make_test_plan(*layout_overrides("tp4-sp"))
    other = make_test_plan(*layout_overrides("pp2-dp2"), *SHARDED)
    (wanted, *_), _ = train(layout_overrides("tp1"), steps=2)
    for curves in run_grid(_train_on_two_grids, plan.grid, plan.to_json(), other.to_json()):
        for curve in curves:
            np.testing.assert_allclose(curve, wanted, rtol=1e-9)


# One group without the common timeout.


def _timeouts(env):
    """Seconds that every group has, ours and torch's own."""
    groups = [group for group in _members(env.groups) if group.handle is not None]
    ours = {group.timeout_s for group in groups}
    theirs = {
        group.resolve()._get_backend(env.device).options._timeout.total_seconds()
        for group in groups
    }
    return ours, theirs


def _members(groups):
    """The members of Groups that are groups."""
    members = (getattr(groups, name) for name in type(groups).__slots__)
    return [member for member in members if isinstance(member, Group)]


def test_every_group_has_the_one_timeout():
    plan = make_test_plan(*layout_overrides("tp2-pp2-dp2"))
    for ours, theirs in run_grid(_timeouts, plan.grid):
        assert len(ours) == 1 and theirs == ours


# Recompute that draws other random numbers than the forward pass.


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "memory",
    [
        ("memory.recompute=full",),
        ("memory.recompute=selective", "memory.recompute_parts=[attention,activation,norm]"),
    ],
)
def test_recompute_changes_no_bit_with_dropout(memory):
    job = (
        "model.hidden_dropout=0.2",
        "model.attention_dropout=0.1",
        *layout_overrides("tp2-pp2-sp"),
    )
    curves, _ = train(job, steps=3)
    again, _ = train([*job, *memory], steps=3)
    np.testing.assert_allclose(again, curves, rtol=1e-12)


# A sampler that replays or restarts when a run is resumed.


@pytest.mark.parametrize("seed", range(5))
def test_three_epochs_with_kills_and_changing_grids_visit_each_window_once_an_epoch(seed):
    random, num_windows, size, every = Random(seed), 97, 12, 3
    history: list[int] = []
    committed = step = 0
    while len(history) < 3 * num_windows:
        batch = make_batch(
            global_batch_size=size,
            micro_batch_size=random.choice([1, 2, 3]),
            dp=random.choice([1, 2, 3, 4]),
        )
        history += sorted(
            sample
            for rank in range(batch.dp)
            for index in range(batch.num_micro_batches)
            for sample in batch.samples(index, rank, len(history))
            if sample >= 0
        )
        step += 1
        if step % every == 0:
            committed = step
        if random.random() < 0.2:  # killed: the history ends where the last checkpoint stands
            step = committed
            del history[step * size :]
    assert history == list(range(len(history)))
    for epoch in range(3):
        order = RowOrder(one_shard(num_windows), seed=7, block_bytes=1)
        samples = range(epoch * num_windows, (epoch + 1) * num_windows)
        windows = [order.row(history[sample]) for sample in samples]
        assert sorted(windows) == list(range(num_windows))


# Options that were only ever tested alone.

EVERYTHING = (
    "model.family=qwen3",
    "model.vocab_size=300",
    "model.num_kv_heads=2",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "model.label_smoothing=0.1",
    "model.z_loss=0.001",
    "data.global_batch_size=14",
    "data.batch_ramp=[{until_samples: 10, global_batch_size: 5}]",
    "optimizer.lr_schedule=wsd",
    "optimizer.lr_cooldown_steps=2",
    "optimizer.embedding_lr=1.5e-3",
    "optimizer.norm_lr=6e-3",
    "optimizer.layer_lr_decay=0.9",
    "optimizer.is_embedding_decayed=false",
    "optimizer.max_grad_norm=0.5",
    "schedule.micro_batch_size=1",
)
ON_THE_LAYOUT = (
    *SHARDED,
    "memory.recompute=selective",
    "memory.recompute_parts=[attention,activation,norm]",
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp4-pp2-sp", "tp2-pp2-dp2-sp", "pp2-dp3"])
def test_everything_at_once_is_the_same_run(layout):
    reference = train([*EVERYTHING, *layout_overrides("tp1")], steps=4)
    assert_same_run([*EVERYTHING, *layout_overrides(layout), *ON_THE_LAYOUT], reference)


# A parameter without a gradient that holds a bucket back.

FOUR_SAMPLES = ("data.global_batch_size=4", "schedule.micro_batch_size=1")
IDLE = "layers.1."


def _leave_out(module, samples):
    """Micro-batches of ``samples`` go past block 1, whose parameters get no gradient of them."""
    forward, block = module.forward, module.layers["1"]
    through, current = block.forward, set()

    def stage(*args):
        current.clear()
        current.update(args[4].tolist())
        return forward(*args)

    module.forward = stage
    block.forward = lambda x, token_layout: (
        x.view_as(x) if current <= samples else through(x, token_layout)
    )


def _train_without_a_block(env, plan_json, samples):
    """(loss, gradient norm, this rank's part of the norm of the block left out) of each step."""
    parts = _build(env, plan_json)
    _leave_out(parts.modules[0], samples)
    state, curve, idle = TrainState(), [], []
    for _ in range(3):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.append((outcome.loss, outcome.grad_norm))
        shares = [pair for pair in parts.gradients.shares() if pair[0].name.startswith(IDLE)]
        idle.append(float(local_norm_sq(shares, env.device)))
    return curve, idle


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("samples", "sharding"),
    [
        ({4, 5, 6, 7}, "optimizer"),
        ({4, 5, 6, 7}, "gradients"),
        ({4, 5, 6, 7}, "parameters"),
        ({5, 7}, "optimizer"),  # rank 1's; from gradients on all ranks use the same blocks
    ],
)
def test_parameters_that_take_no_part_in_the_second_step_count_as_zero_in_it(samples, sharding):
    alone = (*FOUR_SAMPLES, *layout_overrides("tp1"))
    ((wanted, _),) = _on_ranks(_train_without_a_block, *alone, args=(samples,))
    shared = (*FOUR_SAMPLES, *layout_overrides("dp2"), f"parallel.sharding={sharding}")
    for curve, idle in _on_ranks(_train_without_a_block, *shared, args=(samples,)):
        np.testing.assert_allclose(curve, wanted, rtol=1e-9)
        assert idle[0] > 0 and idle[2] > 0
        assert (idle[1] == 0) == (len(samples) == 4), "zero where no rank used them"


def _train_with_a_frozen_norm(env, plan_json):
    parts = _build(env, plan_json)
    for param in _parameters(parts):
        if "mlp_norm" in param.spec.name:
            param.requires_grad_(False)
    return _steps(parts, 2)


def test_frozen_parameters_hold_nothing_back():
    curves = {}
    for layout in ("tp1", "pp2-dp2"):
        for curve in _on_ranks(_train_with_a_frozen_norm, *layout_overrides(layout), *SHARDED):
            curves[layout] = curve
            np.testing.assert_allclose(curve, curves["tp1"], rtol=1e-9)
