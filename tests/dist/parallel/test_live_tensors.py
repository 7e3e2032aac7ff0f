"""Nothing that a step makes outlives it: no node of autograd that reaches its own output."""

import gc

import pytest
import torch
from torch.autograd.function import BackwardCFunction

from raymega.data.prefetch import Ahead
from raymega.messages import Requests
from raymega.plan.cp_layout import inner_ranks
from raymega.plan.run_plan import read_plan
from raymega.plan.zero_levels import data_parallel_shard_size
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

EXPERTS = (
    "model.moe={num_experts: 4, intermediate_size: 16}",
    "parallel.ep=2",
    "schedule.micro_batch_size=2",
)
PACKED = ("data.packing=best_fit", "data.packing_window=64", "data.document_multiple=8")
DYNAMIC = (*PACKED, "parallel.dynamic_cp=true", "schedule.micro_batch_size=1")
TURNS, STEPS = 3, 3


def _num_live():
    """Tensors, and nodes of our own functions, that somebody holds."""
    # what makes the next step's input has one thread: once it does this, that input is there
    for thing in gc.get_objects():
        if isinstance(thing, Ahead):
            thing._thread.submit(int).result()
    gc.collect()
    kinds = [type(thing) for thing in gc.get_objects()]
    tensors = sum(issubclass(kind, torch.Tensor) for kind in kinds)
    return tensors, sum(issubclass(kind, BackwardCFunction) for kind in kinds)


def _live_after_steps(env, plan_json):
    # modules and what else was there before are neither walked nor counted
    gc.freeze()
    plan = read_plan(plan_json)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    counts = []
    for _ in range(TURNS):
        # each turn ends at the same place in the data: the loader holds as many tensors of the next step
        state = TrainState()
        for _ in range(STEPS):
            state = train_step(parts, state, Requests(), is_recording=False).state
        counts.append(_num_live())
    # caches fill in the first turn
    return counts[1], counts[-1]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp2-pp2-sp", ("schedule.chunks=2", "memory.recompute=selective")),
        ("pp2-dp2", ("schedule.name=zb_h1", "parallel.sharding=parameters")),
        ("cp4", ("parallel.cp_method=hybrid", "memory.recompute=full")),
        ("cp2-dp2", DYNAMIC),
        ("tp2-dp2-sp", EXPERTS),
        (
            "dp2",
            (*EXPERTS, "parallel.moe_token_dispatcher_type=all_gather", "memory.recompute=full"),
        ),
    ],
)
def test_more_steps_hold_no_more_tensors(layout, options):
    plan = make_test_plan(*layout_overrides(layout), *options)
    parallel = plan.job.parallel
    counts = run_grid(
        _live_after_steps,
        plan.grid,
        plan.to_json(),
        hierarchical_cp_size=inner_ranks(parallel),
        is_nested=parallel.dynamic_cp,
        sharers=data_parallel_shard_size(parallel),
    )
    for few, more in counts:
        assert more == few
