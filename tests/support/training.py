"""Whole runs of the verify job on real ranks, and whether two of them are the same run."""

from dataclasses import fields

import numpy as np
import torch

from raymega.messages import Requests
from raymega.parallel.comm import process_groups
from raymega.parallel.comm.process_groups import Group
from raymega.plan.cp_layout import inner_ranks
from raymega.plan.group_usage import unused_groups
from raymega.plan.run_plan import read_plan
from raymega.plan.zero_levels import data_parallel_shard_size
from raymega.train.build import build_parts
from raymega.train.state import TrainState
from raymega.train.step import train_step
from tests.support.jobs import make_test_plan
from tests.support.ranks import TIMEOUT_S, run_grid
from tests.support.references.plain_models import slices

LIMIT = 1e-9
STEPS = 3


def train(overrides, *, steps=STEPS, timeout=TIMEOUT_S):
    """Curves of (loss, gradient norm) by rank, and every state tensor put together."""
    plan = make_test_plan(*overrides)
    parallel = plan.job.parallel
    results = run_grid(
        _train_rank,
        plan.grid,
        plan.to_json(),
        steps,
        hierarchical_cp_size=inner_ranks(parallel),
        is_nested=parallel.dynamic_cp,
        sharers=data_parallel_shard_size(parallel),
        unused=unused_groups(plan),
        timeout=timeout,
    )
    # A stage may lack the layers that a group serves, so one rank that uses it is enough.
    unused = set.intersection(*(set(opened) - used for *_, opened, used in results))
    assert not unused, f"groups that got a communicator and were not used: {sorted(unused)}"
    # put the ranks' boxes together; where replicas overlap they must agree
    whole = {}
    for _, blocks, *_ in results:
        for name, shape, box, values in blocks:
            target = whole.setdefault(name, np.full(shape, np.nan))
            held = target[slices(box)]
            same = np.isnan(held) | (np.abs(held - values) <= LIMIT)
            assert same.all(), f"{name}: replicas differ"
            target[slices(box)] = values
    return [curve for curve, *_ in results], whole


def assert_same_run(overrides, wanted, *, timeout=TIMEOUT_S):
    """Training with ``overrides`` gives the curve and the state of ``wanted`` to rounding."""
    wanted_curves, wanted_whole = wanted
    curves, whole = train(overrides, steps=len(wanted_curves[0]), timeout=timeout)
    # equal on all ranks to the bit, then equal to the reference to rounding
    assert all(other == curves[0] for other in curves), "ranks disagree on loss or norm"
    np.testing.assert_allclose(curves[0], wanted_curves[0], rtol=LIMIT)
    assert whole.keys() == wanted_whole.keys()
    for name, values in wanted_whole.items():
        assert np.isfinite(whole[name]).all(), f"{name}: not covered by the ranks"
        np.testing.assert_allclose(whole[name], values, rtol=0, atol=LIMIT, err_msg=name)


def _train_rank(env, plan_json, steps):
    plan, handles = read_plan(plan_json), set()
    _note_used(handles)
    parts = build_parts(plan, rank=env.rank, groups=env.groups, device=env.device)
    state, curve = TrainState(), []
    for _ in range(steps):
        outcome = train_step(parts, state, Requests(), is_recording=False)
        state = outcome.state
        curve.append((outcome.loss, outcome.grad_norm, outcome.mtp_loss or 0.0))
    blocks = [
        (block.name, block.tensor.shape, block.box, _as_array(block.values))
        for block in parts.optimizer.blocks()
    ]
    groups = (getattr(env.groups, field.name) for field in fields(env.groups))
    opened = [group for group in groups if isinstance(group, Group) and group.handle]
    # Groups that share a communicator are used together.
    used = {group.name for group in opened if group.handle in handles}
    return curve, blocks, [group.name for group in opened], used


def _note_used(handles):
    """Note torch's name of each group that an operation looks up, in this rank's process."""
    look_up = process_groups.process_group_of

    def noting(handle):
        handles.add(handle)
        return look_up(handle)

    process_groups.process_group_of = noting


def _as_array(values):
    """numpy knows no bfloat16, whose values float32 has all."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy().copy()
