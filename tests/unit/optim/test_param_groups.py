"""Learning rate and decay by role; every tensor of a model has the role that it should."""

import pytest

from raymega.config.schema import OptimizerSection
from raymega.optim.param_groups import Rates, group_by_rates, rates_of
from raymega.plan.tensors import model_tensors
from tests.support.reference import make_model

SECTION = OptimizerSection(
    lr=1.0, weight_decay=0.1, embedding_lr_scale=2.0, head_lr_scale=3.0, norm_lr_scale=4.0
)
RATES = {
    "embedding": Rates(lr_scale=2.0, weight_decay=0.1),
    "head": Rates(lr_scale=3.0, weight_decay=0.1),
    "matrix": Rates(lr_scale=1.0, weight_decay=0.1),
    "norm": Rates(lr_scale=4.0, weight_decay=0.0),
    "bias": Rates(lr_scale=4.0, weight_decay=0.0),
}


@pytest.mark.parametrize("role", RATES)
def test_role_has_its_rates(role):
    assert rates_of(role, SECTION) == RATES[role]


def test_tables_are_not_decayed_when_the_job_says_so():
    section = SECTION.model_copy(update={"is_embedding_decayed": False})
    assert rates_of("embedding", section) == Rates(lr_scale=2.0, weight_decay=0.0)
    assert rates_of("head", section) == RATES["head"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_tensors_have_the_role_that_their_name_tells(family, is_tied):
    for tensor in model_tensors(make_model(family, is_embedding_tied=is_tied)):
        if "norm" in tensor.name and tensor.name.endswith("weight"):
            wanted = "norm"
        elif tensor.name.endswith("bias"):
            wanted = "bias"
        else:
            wanted = {"embedding": "embedding", "head": "head"}.get(
                tensor.name.split(".")[0], "matrix"
            )
        assert tensor.role == wanted, tensor.name


def test_roles_with_equal_rates_are_one_group():
    plain = OptimizerSection(lr=1.0)
    groups = group_by_rates(["matrix", "bias", "embedding", "norm", "head"], lambda r: r, plain)
    assert list(groups.values()) == [["matrix", "embedding", "head"], ["bias", "norm"]]
