"""State that ranks hold in memory: what a step changes, and how ranks without it get it from a replica."""

import pytest
import torch

from raymega.box import Box
from raymega.checkpoint.load.held_state import NONE, HeldState, fill, take_over
from raymega.errors import CheckpointError
from raymega.events import StepFinished
from raymega.messages import Requests
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

dist = pytest.mark.dist
HYBRID = ("parallel.sharding=optimizer", "parallel.data_parallel_shard_degree=2")


def _trained(env, plan):
    """Parts and held state after one step."""
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    held = HeldState()
    held.begin(parts.optimizer.blocks(), TrainState().scalars())
    outcome = train_step(
        parts, TrainState(), Requests(), is_recording=False, before_update=held.changing
    )
    assert held.step == NONE, "an update has begun"
    held.completed(StepFinished(step=1, metrics={}), outcome.state.scalars())
    return parts, held, outcome.state


def _take_over(env, plan_json, without, behind):
    """Ranks ``without`` hold nothing and ranks ``behind`` an older step; all get what was trained."""
    plan = read_plan(plan_json)
    parts, held, state = _trained(env, plan)
    trained = [block.values.clone() for block in parts.optimizer.blocks()]
    if env.rank in without:
        held.drop()
    if env.rank in behind:
        held.completed(StepFinished(step=0, metrics={}), TrainState().scalars())
        for block in held.blocks:
            block.values.detach().zero_()
    again = build_parts(
        plan, rank=env.rank, groups=env.groups, device=env.device, has_initial_values=False
    )
    blocks = list(again.optimizer.blocks())
    is_hybrid = plan.job.parallel.sharding != "none"
    group = again.groups.copies if is_hybrid else again.groups.replicas
    try:
        scalars, report = take_over(held, blocks, group, step=1)
    except CheckpointError as error:
        return str(error)
    assert all(torch.equal(block.values, one) for block, one in zip(blocks, trained, strict=True))
    assert scalars == state.scalars()
    assert (report is None) == (env.rank in {*without, *behind})
    return "equal"


@dist
@pytest.mark.parametrize(
    ("layout", "more", "without", "behind"),
    [
        ("tp1-pp1-dp3", (), (0,), (2,)),
        pytest.param("tp2-pp1-dp2", (), (0, 3), (), marks=pytest.mark.wide),
        pytest.param("tp1-pp1-dp4", HYBRID, (1,), (2,), marks=pytest.mark.wide),
    ],
)
def test_ranks_without_the_state_get_it_from_a_replica_bit_for_bit(layout, more, without, behind):
    plan = make_test_plan(*layout_overrides(layout), "data.global_batch_size=12", *more)
    found = run_grid(
        _take_over, plan.grid, plan.to_json(), without, behind, sharers=2 if more else 0
    )
    assert set(found) == {"equal"}


@dist
def test_state_that_no_replica_holds_is_refused_on_every_rank():
    plan = make_test_plan(*layout_overrides("tp1-pp1-dp2"))
    for text in run_grid(_take_over, plan.grid, plan.to_json(), (0,), (1,)):
        assert "of ranks 0, 1 0 hold step 1" in text


def block(name, offset, values):
    values = torch.as_tensor(values)
    tensor = GlobalTensor(
        name=name, shape=(8,), role="norm", tp_dim=-1, init="ones", initializer_range=0.0
    )
    box = Box(offset=(offset,), shape=tuple(values.shape))
    return TensorBlock(kind="model", tensor=tensor, box=box, values=values, is_primary=True)


def test_blocks_are_filled_from_what_covers_them():
    sources = [block("a", 0, [1.0, 2.0, 3.0]), block("a", 3, [4.0, 5.0])]
    wanted = [block("a", 1, [0.0, 0.0, 0.0])]
    assert fill(wanted, sources)
    assert wanted[0].values.tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [block("a", 0, [1.0, 2.0, 3.0])],
        [block("b", 0, [1.0, 2.0, 3.0, 4.0, 5.0])],
        [block("a", 0, [1, 2, 3, 4, 5])],
    ],
    ids=["nothing", "a-part", "another-tensor", "another-format"],
)
def test_blocks_that_are_not_covered_are_left_as_they_are(sources):
    wanted = [block("a", 0, [9.0, 9.0]), block("a", 2, [9.0, 9.0])]
    assert not fill(wanted, sources)
    assert wanted[0].values.tolist() == wanted[1].values.tolist() == [9.0, 9.0]


def test_attempt_that_ends_in_an_update_holds_nothing():
    held = HeldState()
    held.begin([block("a", 0, [1.0])], {"step": 3})
    held.leave_device()
    assert held.step == 3 and held.is_finished
    held.changing()
    held.leave_device()
    assert held.step == NONE and held.blocks == []
