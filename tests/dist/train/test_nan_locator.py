"""A planted number that is not finite is found: which module, direction, rank and micro-batch."""

import math

import pytest
import torch

from raymega.errors import NumericsError
from raymega.messages import Requests
from raymega.model.layers.transformer_block import TransformerBlock
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist


def _module(parts, name):
    return dict(parts.modules[0].named_modules()).get(name)


class _Infinite(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf


def _plant(parts, rank, plant):
    """Put the fault into this rank's parts; most are on one rank only."""
    kind, at, name = plant
    module = _module(parts, name)
    if rank != at or module is None:
        return
    if kind == "weight":
        with torch.no_grad():
            module.weight[0, 0] = math.inf
    elif kind == "output":
        calls = []

        def spoil(_module, _args, output):
            calls.append(1)
            return output * (math.nan if len(calls) % 4 == 3 else 1.0)

        module.register_forward_hook(spoil)
    elif kind == "gradient":
        module.register_forward_pre_hook(lambda _module, args: (_Infinite.apply(args[0]),))
    elif kind == "mask":
        batches = parts.loader.micro_batches

        def spoiled(*args):
            found = batches(*args)
            found[1].mask[0, 0] = math.inf
            return found

        parts.loader.micro_batches = spoiled


def _fail(env, plan_json, plant):
    """Text of the error; and whether weights kept their bits."""
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    _plant(parts, env.rank, plant)
    before = [block.values.clone() for block in parts.optimizer.blocks()]
    with pytest.raises(NumericsError) as caught:
        train_step(parts, TrainState(), Requests(), is_recording=False)
    after = [block.values for block in parts.optimizer.blocks()]
    kept = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return str(caught.value), kept, len(next(iter(parts.modules[0].layers.values()))._forward_hooks)


def _located(layout, plant, *overrides):
    batch = f"data.global_batch_size={8 if 'dp2' in layout else 4}"
    micro = "schedule.micro_batch_size=1"
    plan = make_test_plan(*layout_overrides(layout), micro, batch, *overrides)
    results = run_grid(_fail, plan.grid, plan.to_json(), plant)
    (text,) = {text for text, _, _ in results}
    assert all(kept for _, kept, _ in results), "weights or moments changed"
    assert {hooks for _, _, hooks in results} == {0}, "a hook was left behind"
    return text


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layout", "plant", "wanted"),
    [
        (
            "tp1",
            ("weight", 0, "layers.2.mlp.down"),
            "the weight layers.2.mlp.down.weight holds it before the step: rank 0 (tp 0, cp 0, pp 0, dp 0)",
        ),
        (
            "tp2-pp2",
            ("weight", 3, "layers.2.attention.out"),
            "the weight layers.2.attention.out.weight holds it before the step: rank 3 (tp 1, cp 0, pp 1, dp 0)",
        ),
        (
            "tp1",
            ("output", 0, "layers.1.mlp.gate_up"),
            "layers.1.mlp.gate_up makes it from finite inputs, in forward: micro-batch 2, rank 0",
        ),
        (
            "pp2-dp2",
            ("output", 3, "layers.3.attention.qkv"),
            "layers.3.attention.qkv makes it from finite inputs, in forward: micro-batch 2, "
            "rank 3 (tp 0, cp 0, pp 1, dp 1)",
        ),
        (
            "tp1",
            ("gradient", 0, "layers.2.mlp.down"),
            "the gradient by the output of layers.2.mlp.gate_up is the first, in backward: "
            "micro-batch 0, rank 0",
        ),
        (
            "tp2-pp2",
            ("gradient", 0, "layers.1.attention"),
            "the gradient by the output of layers.1.attention_norm is the first, in backward: "
            "micro-batch 0, rank 0 (tp 0, cp 0, pp 0, dp 0)",
        ),
        (
            "pp2",
            ("gradient", 1, "layers.2.mlp.down"),
            "the gradient by the output of layers.2.mlp.gate_up is the first, in backward: "
            "micro-batch 0, rank 1 (tp 0, cp 0, pp 1, dp 0)",
        ),
        ("dp2", ("mask", 1, ""), "it enters the loss from what is computed before it: micro-batch 1, rank 1"),
    ],
)  # fmt: skip
def test_first_number_that_is_not_finite_is_located(layout, plant, wanted):
    text = _located(layout, plant)
    assert "step 1: loss=" in text and wanted in text, text


def test_sharded_weights_are_searched_too():
    text = _located("dp2", ("output", 1, "layers.1.mlp"), "parallel.sharding=optimizer")
    assert "layers.1.mlp makes it from finite inputs, in forward: micro-batch 2, rank 1" in text


def test_blocks_have_the_names_that_are_told():
    plan = make_test_plan(*layout_overrides("tp1"))
    from raymega.parallel.comm.process_groups import build_groups

    groups = build_groups(plan.grid, 0, timeout_s=10)
    parts = build_parts(plan, rank=0, groups=groups, device=torch.device("cpu"))
    blocks = [
        name
        for name, module in parts.modules[0].named_modules()
        if isinstance(module, TransformerBlock)
    ]
    assert blocks == [f"layers.{i}" for i in range(4)]
