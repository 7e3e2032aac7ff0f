"""Bounds of what is odd or silent, refused where they would make everything so."""

import pytest

from raymega.errors import PlanError
from raymega.plan.validation.elastic import host_faults
from tests.support.jobs import make_test_plan


@pytest.mark.parametrize(
    "override",
    ["elastic.spike_loss=1.0", "elastic.spike_grad_norm=0.5", "elastic.straggler_ratio=1.0"],
)
def test_ratio_that_what_is_usual_exceeds_is_refused(override):
    with pytest.raises(PlanError, match=override.removesuffix(".0")):
        make_test_plan(override)
    assert make_test_plan(override.partition("=")[0] + "=0.0")


def test_deadline_bounds_come_in_order():
    with pytest.raises(
        PlanError, match=r"elastic.hang_timeout_min_s=9; .*elastic.hang_timeout_max_s=8"
    ):
        make_test_plan("elastic.hang_timeout_min_s=9.0", "elastic.hang_timeout_max_s=8.0")


@pytest.mark.parametrize("field", ["elastic.spares", "elastic.snapshot_every"])
def test_host_that_keeps_no_process_has_no_use_for_what_needs_them(field):
    values = {"spares": int(field == "elastic.spares"), "snapshot_every": int("snap" in field)}
    (fault,) = host_faults("ray_train", **values)
    assert fault.fact == f"cluster.host=ray_train with {field}=1"
    assert host_faults("ray", **values) == []
