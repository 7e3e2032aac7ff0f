"""Peak bytes of tensors by level of sharding are what the planner says, and fall as it says."""

import time
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.profiler import ProfilerActivity, profile

from raymega.messages import Requests
from raymega.parallel.comm.work import Work
from raymega.plan import zero_levels
from raymega.plan.memory.state_bytes import rank_state
from raymega.plan.run_plan import read_plan
from raymega.plan.zero_levels import data_parallel_shard_size
from raymega.planner.cost.peak_memory import memory_use
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

LIMIT = 0.03
GLOO = "pt_gloo_runloop"
"""What torch calls the threads that carry out gloo's collectives."""
MANY_BUCKETS = 16
"""How many of the copies that gloo makes of what it gathers are there at once is chance: buckets are small."""
STATE_OF_NEARLY_ALL = (
    "model.hidden_size=128", "model.num_heads=4", "model.num_kv_heads=4", "model.ffn_hidden_size=512",
    "model.num_layers=16", "model.vocab_size=64", "model.make_vocab_size_divisible_by=64", "data.seq_len=8",
    "data.global_batch_size=8", "schedule.micro_batch_size=1", "precision.dtype=bfloat16",
    "run.eval_samples=0",
)  # fmt: skip


def allocated(events):
    """What tensors of this thread held after each allocation and release, from the profiler's tree."""
    pending = list(events)
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name == "[memory]":
            yield event.extra_fields.total_allocated


def _peak(env, plan_json):
    """The most bytes that tensors of rank 0 held while it was built, and in a step.

    A thread of gloo that has told of the end of a collective still holds its bucket until it is
    scheduled again, which is chance: each wait goes on until all of them sleep. Of three steps the one
    counts in which they had the fewest copies at once.
    """
    wait = Work.wait

    def wait_and_let_go(pending, timeout_s):
        wait(pending, timeout_s)
        while not _has_let_go():
            time.sleep(0.0001)

    Work.wait = wait_and_let_go
    zero_levels.MIN_BUCKETS = MANY_BUCKETS
    plan = read_plan(plan_json)
    parts, peaks = None, []
    for part in ("build", *["step"] * 3):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=env.rank == 0) as watched:
            if part == "build":
                parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
            else:
                train_step(parts, TrainState(), Requests(), is_recording=False)
                # torch's profiler must not end while gloo's threads tell it of memory.
                parts.weights.wait_for_all()
        if env.rank == 0:
            tree = watched.profiler.kineto_results.experimental_event_tree()
            peaks.append(max(allocated(tree)))
    return (peaks[0], min(peaks[1:])) if peaks else ()


def _has_let_go():
    """No thread of gloo runs or could: what has ended is let go, and the rest waits for others."""
    tasks = Path("/proc/self/task").iterdir()
    return all(
        (task / "stat").read_text().rpartition(")")[2].split()[0] == "S"
        for task in tasks
        if (task / "comm").read_text().strip() == GLOO
    )


@cache
def _measured(*options):
    """Peaks of the build and of a step, and the plan."""
    plan = make_test_plan(*STATE_OF_NEARLY_ALL, *layout_overrides("dp4"), *options)
    peaks = run_grid(
        _peak, plan.grid, plan.to_json(), sharers=data_parallel_shard_size(plan.job.parallel)
    )
    return *peaks[0], plan


def _planned(plan):
    """What a rank needs by the planner: while it works, and what stays."""
    with patch.object(zero_levels, "MIN_BUCKETS", MANY_BUCKETS):
        use = memory_use(plan)
        state = rank_state(plan.job, plan.stages_of(0), plan.grid, tp_rank=0)
    return use.total_bytes - use.reserved_bytes, state.total_bytes - state.passing_bytes


CASES = [
    ("none", "all"),
    *((level, group) for level in ("optimizer", "gradients", "parameters") for group in ("all", "2")),
]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(("level", "group"), CASES)
def test_peaks_of_build_and_step_are_the_planners_and_fall_as_it_says(level, group):
    built, peak, plan = _measured(
        f"parallel.sharding={level}", f"parallel.data_parallel_shard_degree={group}"
    )
    planned, kept = _planned(plan)
    assert built == pytest.approx(kept, rel=LIMIT)
    assert peak == pytest.approx(planned, rel=LIMIT)
    _, whole, whole_plan = _measured(
        "parallel.sharding=none", "parallel.data_parallel_shard_degree=all"
    )
    fall = _planned(whole_plan)[0] - planned
    assert whole - peak == pytest.approx(fall, rel=LIMIT)


@pytest.mark.wide
def test_a_rank_that_keeps_parts_of_weights_never_has_all_of_them():
    """Not even while it is built, when it makes the first values of everybody's weights."""
    built, _, plan = _measured(
        "parallel.sharding=parameters", "optimizer.name=sgd", "precision.dtype=float32"
    )
    state = rank_state(plan.job, plan.stages_of(0), plan.grid, tp_rank=0)
    assert built == pytest.approx(_planned(plan)[1], rel=LIMIT)
    assert built < 4 * state.num_parameters
