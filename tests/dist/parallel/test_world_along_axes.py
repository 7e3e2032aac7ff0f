"""Sums over the world along its axes: those of one group of all ranks, and equal bits on every rank."""

import pytest
import torch
import torch.distributed as dist

from raymega.messages import Requests
from raymega.parallel.comm import collectives
from raymega.parallel.comm.collectives import all_gather, all_reduce, barrier, broadcast
from raymega.parallel.comm.nccl_warmup import open_communicators
from raymega.parallel.comm.process_groups import NO_HANDLE, Group
from raymega.plan.grid import Grid
from raymega.plan.run_plan import read_plan
from raymega.train.build import build_parts
from raymega.train.forward_backward import evaluate
from raymega.train.replica_divergence import DivergenceCheck
from raymega.train.state import first_state
from raymega.train.step import train_step
from raymega.train.train_statistics import activations_of, norm_metrics
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

NUMBERS = 1000
ROUNDING = 1e-15
"""Largest relative difference of two sums of eight positive numbers in another order."""
HYBRID = {"sharers": 2, "unused": {"replicas", "edp"}}
GRIDS = {
    "tp2-pp2-dp2": (Grid(tp=2, pp=2, dp=2), {}),
    "hybrid": (Grid(tp=2, dp=4), HYBRID),
    "cp2-dp2": (Grid(cp=2, dp=2), {}),
    "tp2-cp2-dp2": pytest.param(Grid(tp=2, cp=2, dp=2), {}, marks=pytest.mark.wide),
    "cp2-pp2-dp2": pytest.param(Grid(cp=2, pp=2, dp=2), {}, marks=pytest.mark.wide),
    "dp8": pytest.param(Grid(dp=8), {}, marks=pytest.mark.wide),
    "tp8": pytest.param(Grid(tp=8), {}, marks=pytest.mark.wide),
    "pp4-dp2": pytest.param(Grid(pp=4, dp=2), {}, marks=pytest.mark.wide),
    "hybrid-pp2": pytest.param(Grid(pp=2, dp=4), HYBRID, marks=pytest.mark.wide),
    "tp2-dp4-ep2": pytest.param(Grid(tp=2, dp=4, ep=2), {}, marks=pytest.mark.wide),
}


def _numbers(rank, dtype=torch.float64):
    numbers = torch.rand(
        NUMBERS, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    )
    return numbers if dtype is torch.float64 else (numbers * 200).to(dtype)


def _reduce(env):
    """Sum, largest and rows of all ranks, along the axes and in torch's group of all ranks."""
    world = env.groups.world
    assert world.handle == NO_HANDLE and world.axes
    found, wanted = {}, {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
        found[name] = all_reduce(_numbers(env.rank), world, op=name)
        wanted[name] = _numbers(env.rank)
        dist.all_reduce(wanted[name], op)
    for dtype in (torch.float64, torch.int64, torch.uint8):
        mine = _numbers(env.rank, dtype)
        found[str(dtype)] = all_gather(mine, world)
        wanted[str(dtype)] = mine.new_empty(NUMBERS * env.grid.world_size)
        dist.all_gather_into_tensor(wanted[str(dtype)], mine)
    for source in range(env.grid.world_size):
        found[f"broadcast of {source}"] = broadcast(_numbers(env.rank), world, source)
        wanted[f"broadcast of {source}"] = _numbers(source)
    barrier(world)
    open_communicators(env.groups, env.device)
    return found, wanted


@pytest.mark.parametrize(("grid", "more"), GRIDS.values(), ids=GRIDS)
def test_sums_along_axes_are_those_of_one_group_and_equal_on_all_ranks(grid, more):
    results = run_grid(_reduce, grid, most_in_world=grid.world_size - 1, **more)
    for found, wanted in results:
        for name, values in found.items():
            assert torch.equal(values, results[0][0][name]), f"{name} differs between ranks"
            if name == "sum":
                torch.testing.assert_close(values, wanted[name], rtol=ROUNDING, atol=0.0)
            else:
                assert torch.equal(values, wanted[name]), name


def _reduce_with_other_rounding(env):
    """As where NCCL adds in another order on each group: what a rank gets depends on the rank."""
    start = collectives.start_all_reduce

    def start_and_round(tensor, group, op="sum"):
        start(tensor, group, op).wait(group.timeout_s)
        tensor.mul_(1 + env.rank * torch.finfo(tensor.dtype).eps)
        return collectives._start("all_reduce", tensor, alone, lambda _: None)

    alone = Group(name="alone", ranks=(env.rank,), index=0, timeout_s=0.0, handle=None)
    collectives.start_all_reduce = start_and_round
    return all_reduce(_numbers(env.rank), env.groups.world)


def test_all_ranks_take_the_bits_of_the_first_where_groups_round_differently():
    grid = Grid(tp=2, pp=2, dp=2)
    results = run_grid(_reduce_with_other_rounding, grid, most_in_world=1)
    assert all(torch.equal(each, results[0]) for each in results)


def _train(env, plan_json):
    """Numbers of two steps and an evaluation, and the names of the groups that were used."""
    plan, used = read_plan(plan_json), set()
    resolve = Group.resolve

    def noting(group):
        used.add(group.name)
        return resolve(group)

    Group.resolve = noting
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    state, numbers = first_state(plan.job.precision), []
    for _ in range(2):
        with activations_of(parts, is_due=True) as activations:
            outcome = train_step(parts, state, Requests(), is_recording=False)
        metrics = activations.metrics(state, outcome) | norm_metrics(parts, outcome)
        DivergenceCheck(parts).check(outcome.state.step, is_saving=True)
        loads = [number for load in outcome.loads.values() for number in load.counts.tolist()]
        state = outcome.state
        numbers += [outcome.loss, outcome.grad_norm, outcome.tokens, *metrics.values(), *loads]
    return [*numbers, *evaluate(parts).values()], used


@pytest.mark.parametrize(
    "layout", ["tp2-pp2-dp2", pytest.param("tp2-dp2-ep2-etp1", marks=pytest.mark.wide)]
)
def test_training_along_axes_is_that_of_one_group_and_never_uses_it(layout):
    more = ["elastic.replica_check_every=1", "run.eval_samples=4"]
    if "ep2" in layout:
        more += ["model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.intermediate_size=32"]
    plan = make_test_plan(*layout_overrides(layout), *more)
    one = run_grid(_train, plan.grid, plan.to_json())
    several = run_grid(_train, plan.grid, plan.to_json(), most_in_world=1)
    assert all(numbers == several[0][0] for numbers, _ in several), "ranks disagree"
    assert several[0][0] == pytest.approx(one[0][0], rel=1e-12)
    assert all("world" in used for _, used in one)
    assert not any("world" in used for _, used in several)
