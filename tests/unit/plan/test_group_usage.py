"""Groups without a communicator: what each kind of job does without. That jobs use the rest, `train` checks."""

from dataclasses import fields

import pytest

from raymega.parallel.comm.process_groups import Groups
from raymega.plan.group_usage import EXPERT_GROUPS, unused_groups
from tests.support.jobs import layout_overrides, make_test_plan

EXPERTS = ("model.moe.num_experts=4",)
AUX = (*EXPERTS, "model.moe.router_aux_loss_coef=0.1")
HYBRID = ("parallel.data_parallel_shard_degree=2", "parallel.sharding=parameters")
DENSE = {"cp", "dp", "micro", *EXPERT_GROUPS}
VEE = ("schedule.name=zb_v", "schedule.chunks=2")
TENSORWISE, ROWWISE = (
    (f"precision.fp8={recipe}", "precision.dtype=bfloat16") for recipe in ("tensorwise", "rowwise")
)


@pytest.mark.parametrize(
    ("layout", "options", "unused"),
    [
        ("tp2-pp2-dp2", (), DENSE),
        ("tp2-pp2-dp2", ("model.tie_word_embeddings=false",), {*DENSE, "embedding"}),
        ("tp2-pp2-dp2", VEE, {*DENSE, "embedding"}),
        ("cp2-pp2", TENSORWISE, DENSE - {"micro"}),
        ("cp2-pp2", ROWWISE, DENSE),
        ("pp2-dp4", HYBRID, {*DENSE, "replicas"}),
        ("pp2-dp2-ep2", EXPERTS, {"cp", "dp", "micro"}),
        ("pp2-dp4-ep2", (*EXPERTS, *HYBRID), {"cp", "dp", "micro", "replicas", "edp"}),
        ("pp2-dp2-ep2", (*AUX, "model.moe.load_balancing_type=sequence"), {"cp", "dp"}),
        ("pp2-dp2-ep2", (*AUX, "model.moe.load_balancing_type=global"), {"cp", "dp", "micro"}),
        ("pp2-dp2-ep2", (*EXPERTS, "model.moe.capacity_factor=1.0"), {"cp", "dp"}),
    ],
)
def test_a_job_does_without_the_groups_that_none_of_its_features_send_over(layout, options, unused):
    assert unused_groups(make_test_plan(*layout_overrides(layout), *options)) == unused


def test_every_name_is_a_field_of_groups():
    names = {field.name for field in fields(Groups)}
    plans = [make_test_plan(), make_test_plan(*layout_overrides("dp4-ep2"), *EXPERTS, *HYBRID)]
    assert all(unused_groups(plan) <= names for plan in plans)
