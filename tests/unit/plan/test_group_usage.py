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


@pytest.mark.parametrize(
    ("layout", "options", "unused"),
    [
        ("tp2-pp2-dp2", (), DENSE),
        ("tp2-pp2-dp2", ("model.tie_word_embeddings=false",), {*DENSE, "embedding"}),
        ("tp2-cp2", ("precision.fp8=tensorwise", "precision.dtype=bfloat16"), DENSE - {"micro"}),
        ("tp2-cp2", ("precision.fp8=rowwise", "precision.dtype=bfloat16"), DENSE),
        ("dp4", HYBRID, {*DENSE, "replicas"}),
        ("dp2-ep2", EXPERTS, {"cp", "dp", "micro"}),
        ("dp4-ep2", (*EXPERTS, *HYBRID), {"cp", "dp", "micro", "replicas", "edp"}),
        ("dp2-ep2", (*AUX, "model.moe.load_balancing_type=sequence"), {"cp", "dp"}),
        ("dp2-ep2", (*AUX, "model.moe.load_balancing_type=global"), {"cp", "dp", "micro"}),
        ("dp2-ep2", (*EXPERTS, "model.moe.capacity_factor=1.0"), {"cp", "dp"}),
    ],
)
def test_a_job_does_without_the_groups_that_none_of_its_features_send_over(layout, options, unused):
    assert unused_groups(make_test_plan(*layout_overrides(layout), *options).job) == unused


def test_every_name_is_a_field_of_groups():
    names = {field.name for field in fields(Groups)}
    plans = [make_test_plan(), make_test_plan(*layout_overrides("dp4-ep2"), *EXPERTS, *HYBRID)]
    assert all(unused_groups(plan.job) <= names for plan in plans)
