"""What waits on the host by the planner: bytes of two units stay, copies hide behind the work that is there."""

from dataclasses import replace

import pytest

from raymega.plan.hardware.catalog import accelerator
from raymega.plan.memory.activation_bytes import layer_bytes, stage_activations
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import rank_state
from raymega.planner.cost.layer_time import layer_time
from raymega.planner.cost.step_time import step_time
from raymega.planner.kernels.system_traits import RAYMEGA
from tests.support.jobs import make_test_plan

AWAY = "memory.offload=[activations]"
DEEP = ("model.num_layers=8", "parallel.pp=1", "precision.dtype=bfloat16")


def _kept(*overrides):
    plan = make_test_plan(*DEEP, *overrides)
    shape = activation_shape(plan.job)
    return shape, stage_activations(shape, plan.stages[0])


def test_two_blocks_stay_and_all_are_on_the_host():
    shape, here = _kept()
    _, away = _kept(AWAY)
    assert away.host_bytes == 8 * layer_bytes(shape)
    assert here.micro_batch_bytes - away.micro_batch_bytes == away.host_bytes
    assert away.rerun_bytes == 2 * layer_bytes(shape)


def test_with_full_recompute_only_inputs_go():
    shape, here = _kept("memory.recompute=full", "memory.recompute_every=2")
    _, away = _kept("memory.recompute=full", "memory.recompute_every=2", AWAY)
    assert away.host_bytes == 4 * shape.stream_bytes
    assert away.rerun_bytes - here.rerun_bytes == 2 * shape.stream_bytes


def test_a_slow_link_sets_the_pace_and_a_fast_one_is_hidden():
    shape, _ = _kept(AWAY)
    h100 = accelerator("h100")
    slow, fast = (
        layer_time(shape, replace(h100, host_bytes_per_s=speed), RAYMEGA) for speed in (1e6, 1e15)
    )
    assert fast.pass_s("none") == layer_time(_kept()[0], h100, RAYMEGA).pass_s("none")
    seconds = layer_bytes(shape) / (1e6 * h100.fitted.link_share)
    assert slow.pass_s("none") == pytest.approx((seconds, seconds))


def test_state_on_the_host_leaves_three_portions_and_takes_the_links_time():
    large = (
        "model.hidden_size=4096", "model.num_heads=32", "model.num_kv_heads=8", "model.ffn_hidden_size=14336",
        "model.num_layers=8", "parallel.pp=1", "precision.dtype=bfloat16", "cluster.device=cuda",
    )  # fmt: skip
    here, away = (
        make_test_plan(*large, f"memory.offload={text}") for text in ("[]", "[optimizer]")
    )
    mine, theirs = (rank_state(p.job, p.stages, p.grid, tp_rank=0) for p in (away, here))
    assert mine.host_bytes == theirs.master_bytes + theirs.moment_bytes == 12 * mine.num_owned
    assert theirs.total_bytes - mine.total_bytes == mine.host_bytes
    assert mine.update_bytes - theirs.update_bytes == 3 * 2**24 * 12
    h100 = accelerator("h100")
    seconds = mine.host_bytes / (64e9 * h100.fitted.link_share)
    assert step_time(away, h100).optimizer_s == pytest.approx(seconds)
    assert step_time(here, h100).optimizer_s < seconds
