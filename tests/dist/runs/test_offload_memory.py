"""Bytes on the host and on the device of a job with offload are what the planner says, to 3 %."""

from unittest.mock import patch

import pytest
from torch.profiler import ProfilerActivity, profile

from raymega.messages import Requests
from raymega.optim import optimizer
from raymega.parallel.core.host_copies import HostMemory
from raymega.plan.memory import state_bytes
from raymega.plan.memory.activation_bytes import activation_shape, stage_activations
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


def _peak(env, plan_json):
    """The most bytes of build and step; on a CPU host and device are one memory."""
    optimizer.PORTION_ELEMENTS = PORTION
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        parts = build_parts(read_plan(plan_json), rank=0, groups=env.groups, device=env.device)
        train_step(parts, TrainState(), Requests(), is_recording=False)
    tree = watched.profiler.kineto_results.experimental_event_tree()
    return max(allocated(tree))


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_optimizer_state_on_the_host_leaves_as_many_portions_as_planned(optimizer):
    overrides = (*STATE, f"optimizer.name={optimizer}")
    peaks, planned = {}, {}
    for text in ("[]", "[optimizer]"):
        plan = make_test_plan(*overrides, f"memory.offload={text}")
        peaks[text] = run_grid(_peak, plan.grid, plan.to_json())[0]
        with patch.object(state_bytes, "PORTION_ELEMENTS", PORTION):
            use = memory_use(plan)
            state = rank_state(plan.job, plan.stages, plan.grid, tp_rank=0)
        planned[text] = use.total_bytes - use.reserved_bytes + state.host_bytes
    assert state.passing_bytes < 0.6 * state.host_bytes
    for text, peak in peaks.items():
        assert peak == pytest.approx(planned[text], rel=LIMIT), text


def _sent_away(env, plan_json):
    """Bytes of activations that one step's micro-batch has put on the host."""
    sizes, empty_like = [], HostMemory.empty_like

    def counted(self, tensor):
        sizes.append(tensor.nbytes)
        return empty_like(self, tensor)

    parts = build_parts(read_plan(plan_json), rank=0, groups=env.groups, device=env.device)
    HostMemory.empty_like = counted
    train_step(parts, TrainState(), Requests(), is_recording=False)
    return sum(sizes)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_on_the_host_are_as_many_bytes_as_planned(recompute):
    plan = make_test_plan(*ACTIVATIONS, f"memory.recompute={recompute}")
    found = run_grid(_sent_away, plan.grid, plan.to_json())[0]
    planned = stage_activations(activation_shape(plan.job), plan.stages[0]).host_bytes
    assert found == pytest.approx(planned, rel=LIMIT)
