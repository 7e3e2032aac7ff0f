"""Bytes on the host and on the device of a job with offload are what the planner says, to 3 %."""

from unittest.mock import patch

import pytest
from torch.profiler import ProfilerActivity, profile

from raymega.messages import Requests
from raymega.optim import optimizer
from raymega.parallel.core import pinned_memory
from raymega.parallel.core.host_copies import HostMemory
from raymega.plan.memory import optimizer_state
from raymega.plan.memory.activation_bytes import stage_activations
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import rank_state
from raymega.plan.run_plan import read_plan
from raymega.planner.cost.peak_memory import memory_use
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.dist.runs.test_sharding_memory import LIMIT, STATE_OF_NEARLY_ALL, allocated
from tests.support.jobs import make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

PORTION = 2**20
ONE_RANK = ("parallel.tp=1", "parallel.pp=1")
STATE = (*STATE_OF_NEARLY_ALL, *ONE_RANK)
ACTIVATIONS = (
    *ONE_RANK, "model.hidden_size=64", "model.num_heads=4", "model.num_kv_heads=4", "model.ffn_hidden_size=256",
    "model.num_layers=6", "data.seq_len=128", "model.max_positions=128", "data.global_batch_size=2",
    "schedule.micro_batch_size=2", "precision.dtype=bfloat16", "memory.offload=[activations]",
)  # fmt: skip


def _peak(env, plan_json, *, has_step=True):
    """The most bytes of the device in build and step, and the bytes that are mapped on the host."""
    optimizer.PORTION_ELEMENTS = PORTION
    mapped = _watch_maps()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        parts = build_parts(read_plan(plan_json), rank=0, groups=env.groups, device=env.device)
        if has_step:
            train_step(parts, TrainState(), Requests(), is_recording=False)
    tree = watched.profiler.kineto_results.experimental_event_tree()
    return max(allocated(tree)), sum(mapped)


def _peak_of_build(env, plan_json):
    return _peak(env, plan_json, has_step=False)[0]


def _watch_maps():
    """Sizes of host memory that is mapped from now on."""
    mapped, map_memory = [], pinned_memory.map_memory

    def counted(num_bytes, **how):
        mapped.append(num_bytes)
        return map_memory(num_bytes, **how)

    pinned_memory.map_memory = counted
    return mapped


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_optimizer_state_on_the_host_leaves_as_many_portions_as_planned(optimizer):
    overrides = (*STATE, f"optimizer.name={optimizer}")
    for text in ("[]", "[optimizer]"):
        plan = make_test_plan(*overrides, f"memory.offload={text}")
        peak, mapped = run_grid(_peak, plan.grid, plan.to_json())[0]
        with patch.object(optimizer_state, "PORTION_ELEMENTS", PORTION):
            use = memory_use(plan)
            state = rank_state(plan.job, plan.stages, plan.grid, tp_rank=0)
        assert peak == pytest.approx(use.total_bytes - use.reserved_bytes, rel=LIMIT), text
        assert mapped == pytest.approx(state.host_bytes, rel=LIMIT)
    # state is made portion by portion: building takes one beside what stays
    portion = state.host_bytes * PORTION / state.num_owned
    built = run_grid(_peak_of_build, plan.grid, plan.to_json())[0]
    assert built < (state.total_bytes + portion) * (1 + LIMIT)
    assert 2 * portion < 0.6 * state.host_bytes


def _sent_away(env, plan_json):
    """Bytes of activations that one step's micro-batch has put on the host, and those that are mapped for them."""
    sizes, take, mapped = [], HostMemory.take, _watch_maps()

    def counted(self, num_bytes):
        sizes.append(num_bytes)
        return take(self, num_bytes)

    parts = build_parts(read_plan(plan_json), rank=0, groups=env.groups, device=env.device)
    HostMemory.take = counted
    train_step(parts, TrainState(), Requests(), is_recording=False)
    return sum(sizes), mapped


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_on_the_host_are_as_many_bytes_as_planned(recompute):
    plan = make_test_plan(*ACTIVATIONS, f"memory.recompute={recompute}")
    found, mapped = run_grid(_sent_away, plan.grid, plan.to_json())[0]
    planned = stage_activations(activation_shape(plan.job), plan.stages[0]).host_bytes
    assert found == pytest.approx(planned, rel=LIMIT)
    assert mapped == [planned]
