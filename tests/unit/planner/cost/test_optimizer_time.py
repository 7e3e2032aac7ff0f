"""What an update costs beside its own elements: Muon's exchanges and products, 8-bit maxima."""

import pytest

from raymega.plan.hardware.catalog import accelerator
from raymega.plan.memory.state_bytes import rank_elements
from raymega.planner.cost.optimizer_time import newton_schulz_flops, update_s
from raymega.planner.cost.step_time import step_time
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.traffic import exchanged_bytes

LARGE = (
    "model.hidden_size=4096", "model.num_heads=32", "model.num_kv_heads=8", "model.ffn_hidden_size=14336",
    "model.num_layers=8", "precision.dtype=bfloat16", "cluster.device=cuda",
)  # fmt: skip
MUON, EIGHT = "optimizer.name=muon", "optimizer.state_dtype=8bit"
MATRICES = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)


def _plan(layout, *options):
    return make_test_plan(*LARGE, *layout_overrides(layout), *options)


def _held(plan):
    return rank_elements(plan.job, plan.stages_of(0), plan.grid)


def _bytes(layout, *options):
    plan = _plan(layout, MUON, *options)
    return exchanged_bytes(plan.job, _held(plan), plan.grid)


def test_a_rank_sends_its_part_to_owners_and_gets_it_back():
    elements = 8 * MATRICES
    sharded = "parallel.sharding=optimizer"
    assert _bytes("dp4", sharded) == pytest.approx(2 * elements / 4 * 3 / 4 * 4)
    assert _bytes("tp2", sharded) == pytest.approx(2 * elements / 2 * 1 / 2 * 4)
    assert _bytes("dp4") == pytest.approx(elements / 4 * 3 * 4)  # owners send to all
    assert _bytes("tp1") == 0


def test_products_are_counted_for_each_matrix():
    heads = "model.num_heads=4", "model.num_kv_heads=4"
    model = make_test_plan("model.hidden_size=8", "model.ffn_hidden_size=16", *heads).job.model
    square, wide = 4 * 8**3 + 2 * 8**3, 4 * 8 * 8 * 16 + 2 * 8**3
    assert newton_schulz_flops(model, 0, 5) == 5 * (4 * square + 3 * wide)


def test_a_step_pays_for_it():
    h100, sharded = accelerator("h100"), "parallel.sharding=optimizer"
    for option in (MUON, EIGHT):
        plain, dear = (_plan("dp4", sharded, *more) for more in ((), (option,)))
        extra = update_s(dear.job, _held(dear), dear.grid, h100)
        assert extra > 0 == update_s(plain.job, _held(plain), plain.grid, h100)
        gained = step_time(dear, h100).optimizer_s - step_time(plain, h100).optimizer_s
        assert gained == pytest.approx(extra)
    alone = _plan("tp1", EIGHT)
    assert update_s(alone.job, _held(alone), alone.grid, h100) == 0
