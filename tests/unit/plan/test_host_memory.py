"""Host memory of a rank by part, and which part a GPU has pinned."""

import pytest

from raymega.plan.host_memory import host_memory, offloaded_activation_bytes
from raymega.plan.memory.activation_bytes import stage_activations
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import rank_state
from raymega.plan.save_cost import save_cost
from tests.support.jobs import make_test_plan

ONE = ("parallel.tp=1", "parallel.pp=1", "parallel.dp=1", "precision.dtype=bfloat16")


@pytest.mark.parametrize(
    ("dtype", "is_pinned"), [("bfloat16", False), ("float32", True)], ids=["away", "own masters"]
)
def test_copy_of_state_on_the_host_is_pinned_only_where_some_is_on_the_device(dtype, is_pinned):
    plan = make_test_plan(*ONE[:3], f"precision.dtype={dtype}", "memory.offload=[optimizer]")
    use, state = host_memory(plan, 0), rank_state(plan.job, plan.stages, plan.grid, tp_rank=0)
    assert use.optimizer_bytes == state.host_bytes > 0
    assert use.checkpoint_bytes == save_cost(plan, 0).buffer_bytes > 0
    assert use.total_bytes == use.optimizer_bytes + use.checkpoint_bytes
    assert use.pinned_bytes == use.optimizer_bytes + is_pinned * use.checkpoint_bytes


def test_copies_are_pinned_without_offload_and_snapshots_hold_checkpoints():
    plan = make_test_plan(*ONE, "elastic.snapshot_every=1", "elastic.snapshot_during_save=pause")
    use = host_memory(plan, 0)
    assert (use.optimizer_bytes, use.activation_bytes, use.checkpoint_bytes) == (0, 0, 0)
    assert use.snapshot_bytes == use.total_bytes == use.pinned_bytes > 0


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", 4), ("1f1b", 2)])
def test_activations_of_all_micro_batches_in_flight_are_on_the_host(schedule, held):
    plan = make_test_plan(
        "parallel.tp=1", "parallel.pp=2", "parallel.dp=1", f"schedule.name={schedule}",
        "data.global_batch_size=4", "schedule.micro_batch_size=1", "memory.offload=[activations]",
    )  # fmt: skip
    away = stage_activations(activation_shape(plan.job), plan.stages[0]).host_bytes
    assert offloaded_activation_bytes(plan, 0) == held * away > 0
