"""One flipped bit in one replica is seen and its rank named; healthy ranks agree on every layout."""

import pytest
import torch

from raymega.errors import NumericsError, RollbackError
from raymega.messages import Requests
from raymega.plan.grid import Grid
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.replica_divergence import DivergenceCheck, describe, digest, find_differences
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

EXPERTS = ("model.moe.num_experts=4", "model.moe.intermediate_size=16")


def _flip(parts, name):
    """The lowest bit of one weight."""
    param = dict(parts.modules[0].named_parameters())[name]
    flat = param.data.view(-1)
    flat[:1].view(torch.int64).bitwise_xor_(1)


def _look(env, plan_json, at, name):
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    check, state = DivergenceCheck(parts), TrainState()
    for _ in range(3):
        state = train_step(parts, state, Requests(), is_recording=False).state
        assert "train/divergence_check_s" in check.check(state.step, is_saving=False)
    parts.weights.wait_for_all()
    if env.rank == at:
        _flip(parts, name)
    if at < 0:
        return ""
    with pytest.raises(NumericsError) as caught:
        check.check(4, is_saving=True)
    assert isinstance(caught.value, RollbackError) and caught.value.next_sample == -1
    return str(caught.value)


def _plan(layout, *overrides):
    common = ("data.global_batch_size=8", "elastic.replica_check_every=1")
    return make_test_plan(*layout_overrides(layout), *common, *overrides)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("tp2-sp-dp2", ()),
        ("tp2-pp2", ("model.family=gpt2", "model.num_kv_heads=num_heads")),
        ("dp2-ep2", EXPERTS),
        ("cp2-dp2", ("parallel.sharding=optimizer",)),
        ("dp2", ("parallel.sharding=parameters",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_healthy_ranks_hold_the_same_bits(layout, overrides):
    plan = _plan(layout, *overrides)
    run_grid(_look, plan.grid, plan.to_json(), -1, "")


@pytest.mark.parametrize(
    ("layout", "at", "name", "wanted"),
    [
        ("dp3", 2, "layers.1.mlp.down.weight", "rank 2 differs"),
        ("dp2", 1, "layers.1.mlp.down.weight", "one of ranks 0, 1 differs"),
        ("tp2-dp2", 3, "layers.1.mlp_norm.weight", "rank 3 differs"),
    ],
)
def test_flipped_bit_is_seen_and_its_rank_named(layout, at, name, wanted):
    overrides = ("data.global_batch_size=12",) if layout == "dp3" else ()
    plan = _plan(layout, *overrides)
    (text,) = set(run_grid(_look, plan.grid, plan.to_json(), at, name))
    assert f"after step 4: {wanted}" in text


def test_digest_knows_every_single_bit():
    device, values = torch.device("cpu"), torch.arange(5.0)
    seen = {int(digest([values], device))}
    for place in range(5):
        for bit in range(32):
            flipped = values.clone()
            word = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            flipped.view(torch.int32)[place] ^= word
            seen.add(int(digest([flipped], device)))
    assert len(seen) == 1 + 5 * 32
    halves = [values[:2].bfloat16(), values[2:].bfloat16()]
    assert int(digest(halves, device)) != int(digest(halves[::-1], device))


def test_majority_names_the_odd_one_and_a_tie_names_both():
    grid = Grid(tp=2, dp=3)
    rows = [[7, 0, 1]] * 6
    assert find_differences(rows, grid) == []
    rows[4] = [8, 0, 1]
    (found,) = find_differences(rows, grid)
    assert (found.group, found.odd) == ((0, 2, 4), (4,))
    rows[4] = [8, 0, 2]
    assert describe(find_differences(rows, grid)).startswith("rank 4 differs")
