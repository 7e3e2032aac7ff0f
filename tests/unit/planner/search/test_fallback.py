from itertools import pairwise

import pytest

from raymega.plan.hardware.catalog import CATALOGUE
from raymega.planner.search.fallback import fallbacks, smaller_plan
from tests.support.jobs import make_test_plan
from tests.unit.planner.cost.test_expert_time import plan as expert_plan

JOB = make_test_plan(
    "parallel.tp=2", "parallel.pp=2", "parallel.dp=4", "data.global_batch_size=24"
).job


@pytest.mark.parametrize(("most", "dp"), [(15, 3), (12, 3), (11, 2), (7, 1), (4, 1)])
def test_replicas_go_first(most, dp):
    plan = smaller_plan(JOB, most=most)
    assert plan.grid.describe() == f"tp2-pp2-dp{dp}" if dp > 1 else "tp2-pp2"
    assert plan.batch.global_batch_size == 24
    assert plan.job.cluster.num_workers == "grid"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_replica_that_is_not_whole_is_cut_anew(most):
    assert 1 <= smaller_plan(JOB, most=most).grid.world_size <= most


def test_nothing_is_smaller_than_the_least():
    assert smaller_plan(JOB, most=7, least=5) is None
    assert smaller_plan(JOB, most=3, least=4) is None


def test_illegal_numbers_of_replicas_are_passed_over():
    job = make_test_plan(
        "parallel.pp=2", "parallel.dp=4", "data.global_batch_size=8", "schedule.chunks=2"
    ).job
    plan = smaller_plan(job, most=6)
    assert plan.batch.num_micro_batches % 2 == 0 or plan.grid.dp in (1, 2, 3)


def test_grid_that_does_not_fit_into_memory_is_passed_over():
    tiny = CATALOGUE["h100"].__class__(
        **{f: getattr(CATALOGUE["h100"], f) for f in CATALOGUE["h100"].__slots__}
        | {"memory_bytes": 1}
    )
    assert smaller_plan(JOB, most=4, device=tiny) is None


def test_fallbacks_cover_every_number_of_workers_once():
    found = fallbacks(JOB, limit=8)
    assert found[0].most == 15 and found[0].least == 12
    for before, after in pairwise(found):
        assert after.most == before.least - 1
    assert found[-1].least == 1


def test_a_rank_gets_more_experts_where_fewer_ranks_share_them():
    job = expert_plan(dp=8, ep=8).job
    assert [(smaller_plan(job, most=most).grid.dp, smaller_plan(job, most=most).grid.ep)
            for most in (7, 4, 2)] == [(7, 1), (4, 4), (2, 2)]  # fmt: skip


def test_fallbacks_keep_to_min_workers():
    job = JOB.model_copy(update={"elastic": JOB.elastic.model_copy(update={"min_workers": 8})})
    assert [each.plan.grid.dp for each in fallbacks(job, limit=8)] == [3, 2]


EXPERTS = ("parallel.pp=1", "model.moe.num_experts=8", "schedule.micro_batch_size=2")


@pytest.mark.parametrize(
    "routing",
    [
        ("model.moe.capacity_factor=1.0",),
        ("model.moe.load_balancing_type=sinkhorn",),
        ("model.moe.load_balancing_type=micro_batch", "model.moe.router_aux_loss_coef=0.1"),
    ],
)
def test_micro_batches_that_routing_goes_by_stay(routing):
    job = make_test_plan(*EXPERTS, *routing, "parallel.tp=2", "parallel.dp=2").job
    assert [each.plan.batch.micro_batch_size for each in fallbacks(job, limit=8)] == [2, 2]


def test_a_dispatch_that_one_rank_has_no_use_for_keeps_no_replica_away():
    job = make_test_plan(
        *EXPERTS, "parallel.dp=4", "parallel.ep=2", "parallel.moe_token_dispatcher_type=all_gather"
    ).job
    cut = [(each.plan.grid.dp, each.plan.grid.ep) for each in fallbacks(job, limit=8)]
    assert cut == [(3, 1), (2, 2), (1, 1)]


def test_replicas_that_cannot_be_grouped_as_before_share_out_all():
    job = make_test_plan(
        "parallel.pp=1",
        "parallel.dp=4",
        "parallel.sharding=parameters",
        "parallel.data_parallel_shard_degree=2",
    ).job
    groups = [(each.plan.grid.dp, each.plan.job.parallel.data_parallel_shard_degree)
              for each in fallbacks(job, limit=8)]  # fmt: skip
    assert groups == [(3, "all"), (2, 2), (1, "all")]


def test_smaller_grids_continue_without_a_replica_only_where_one_can_hold_the_state():
    grid = ("parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "data.global_batch_size=24")
    job = make_test_plan(*grid, "elastic.on_replica_loss=continue").job
    whole, cut = (smaller_plan(job, most=most).job for most in (4, 3))
    assert (whole.parallel.dp, whole.elastic.on_replica_loss) == (1, "continue")
    assert (cut.parallel.sharding, cut.elastic.on_replica_loss) == ("optimizer", "restart")
