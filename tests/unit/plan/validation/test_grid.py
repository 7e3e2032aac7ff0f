"""Rules of the grid's degrees."""

from raymega.plan.validation.grid import grid_faults, world_faults


def test_bad_order_and_experts_that_do_not_fit_are_both_reported():
    faults = grid_faults("tp-dp-pp", tp=2, cp=1, dp=1, ep=4, etp=2)
    assert "8 must divide tp=2 * cp=1 * dp=1 = 2" in faults[0].rule
    assert faults[1].fact.startswith("parallel.order")


def test_world_fault_proposes_the_degree_that_fits():
    (fault,) = world_faults(8, tp=2, cp=1, dp=1, pp=2)
    assert "parallel.dp=2" in fault.remedy
    assert world_faults(8, 2, 1, 2, 2) == [] == world_faults("grid", 2, 1, 1, 2)
