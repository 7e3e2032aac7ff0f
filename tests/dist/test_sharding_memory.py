"""Peak bytes of tensors by level of sharding are what the planner says, and fall as it says."""

from functools import cache

import pytest
from torch.profiler import ProfilerActivity, profile

from raymega.messages import Requests
from raymega.plan.levels import group_size
from raymega.plan.run_plan import read_plan
from raymega.plan.state_size import rank_state
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

LIMIT = 0.03
STATE_OF_NEARLY_ALL = (
    "model.width=128", "model.num_heads=4", "model.num_kv_heads=4", "model.ffn_width=512",
    "model.num_layers=8", "model.vocab_size=64", "model.vocab_multiple=64", "data.seq_len=8",
    "data.global_batch_size=8", "schedule.micro_batch_size=1", "precision.dtype=bfloat16",
    "run.eval_samples=0",
)  # fmt: skip


def _allocated(events):
    """What tensors of this thread held after each allocation and release, from the profiler's tree."""
    pending = list(events)
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name == "[memory]":
            yield event.extra_fields.total_allocated


def _peak(env, plan_json):
    """The most bytes that tensors of rank 0 held while it was built, and in a step."""
    plan = read_plan(plan_json)
    parts, peaks = None, []
    for part in ("build", "step"):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=env.rank == 0) as watched:
            if part == "build":
                parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
            else:
                train_step(parts, TrainState(), Requests(), is_recording=False)
        if env.rank == 0:
            tree = watched.profiler.kineto_results.experimental_event_tree()
            peaks.append(max(_allocated(tree)))
    return peaks


@cache
def _measured(*options):
    """Peaks of the build and of the steps, and what the planner says that a rank holds."""
    plan = make_test_plan(*STATE_OF_NEARLY_ALL, *layout_overrides("dp4"), *options)
    peaks = run_grid(_peak, plan.grid, plan.to_json(), sharers=group_size(plan.job.parallel))
    state = rank_state(plan.job, plan.stages_of(0), plan.grid, tp_rank=0)
    return *peaks[0], state.total_bytes


@pytest.mark.parametrize(
    ("level", "group"), [("gradients", "all"), ("parameters", "all"), ("parameters", "2")]
)
def test_peak_of_a_step_falls_as_planned(level, group):
    """Where all weights are gathered at once, gloo's own copies of them come on top."""
    options = f"parallel.sharding={level}", f"parallel.sharding_group={group}"
    _, peak, planned = _measured(*options)
    built, whole, whole_planned = _measured("parallel.sharding=none")
    assert built == pytest.approx(whole_planned, rel=LIMIT)
    assert whole - peak == pytest.approx(whole_planned - planned, rel=LIMIT)
