"""Rules of learning rate, batch ramp, recompute and loss scale: each names its fact and its number."""

import re

import pytest

from raymega.config.load import parse_job
from raymega.errors import PlanError
from raymega.plan.run_plan import make_plan
from tests.support.jobs import VERIFY

RAMP = "data.batch_ramp=[{until_samples: %d, global_batch_size: %d}, {until_samples: %d, global_batch_size: %d}]"
WSD = "optimizer.lr_schedule=wsd"


def _plan(*overrides):
    return make_plan(parse_job(VERIFY, overrides).job())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lr_schedule=inverse_sqrt", "optimizer.lr_warmup_steps=0"], "warm-up step"),
        ([WSD], "optimizer.lr_cooldown_steps=0; .* run.steps=20; use 1 to 20"),
        ([WSD, "optimizer.lr_cooldown_steps=21"], "run.steps=20"),
        ([WSD, "optimizer.lr_cooldown_steps=6", "optimizer.lr_decay_steps=10"], "use 1 to 5 steps"),
        (["optimizer.lr_cooldown_steps=3"], "only lr_schedule=wsd"),
        (["memory.recompute=selective", "memory.recompute_parts=[]"], r"recompute_parts=\[\]"),
        ([RAMP % (64, 4, 64, 8)], r"batch_ramp\[1\].until_samples=64; .* \(64\)"),
        ([RAMP % (64, 8, 96, 4)], r"batch_ramp\[0\].global_batch_size=8; .*next stage's \(4\)"),
        ([RAMP % (64, 8, 96, 16)], r"batch_ramp\[1\].*=16; .*data.global_batch_size \(16\)"),
        (
            ["memory.recompute=selective", "memory.recompute_parts=[]"],
            "recompute_parts=.*recompute=selective .*recompute=none",
        ),
        (["precision.loss_scale=0.5"], "min_loss_scale=1; .*loss_scale=0.5; use at most 0.5"),
    ],
)
def test_each_rule_names_its_fact(overrides, message):
    with pytest.raises(PlanError, match=message):
        _plan(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.lr_schedule=inverse_sqrt", "optimizer.lr_warmup_steps=1"],
        [WSD, "optimizer.lr_cooldown_steps=20"],
        ["memory.recompute=full", "memory.recompute_every=2"],
        [WSD, "optimizer.lr_cooldown_steps=5", "optimizer.lr_decay_steps=10"],
        [RAMP % (64, 4, 96, 8)],
    ],
)
def test_what_the_rules_allow_is_planned(overrides):
    assert _plan(*overrides)


def test_every_fault_of_a_ramp_is_told_at_once():
    with pytest.raises(PlanError) as caught:
        _plan(RAMP % (96, 32, 64, 16))
    assert len(re.findall(r"data\.batch_ramp\[", str(caught.value))) == 3
