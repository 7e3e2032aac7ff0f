"""What binds, and what to try: a change is proposed only if the planner itself finds it faster."""

from dataclasses import replace

import pytest

from raymega.api import load_job, plan
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.planner.cost.peak_memory import memory_use
from raymega.planner.cost.simulated_step import played_step
from raymega.planner.search.advice import advice_line, advise
from raymega.planner.search.search import RankedLayout
from tests.support.jobs import VERIFY

H100, CPU = CATALOGUE["h100"], CATALOGUE["cpu"]


def layout(*overrides, device=H100):
    planned = plan(load_job(VERIFY, overrides))
    return RankedLayout(plan=planned, time=played_step(planned, device), memory=memory_use(planned))


def test_proposed_change_is_as_fast_as_it_is_said_to_be():
    found = layout("parallel.pp=2", "schedule.micro_batch_size=1")
    advice = advise(found, H100)
    assert advice.changes and advice.step_s < found.time.total_s
    changed = layout("parallel.pp=2", "schedule.micro_batch_size=1", *advice.changes)
    assert changed.time.total_s == pytest.approx(advice.step_s)
    assert changed.plan.grid.world_size == found.plan.grid.world_size
    line = advice_line(advice, found, H100)
    assert f"try --set {advice.changes[0]}" in line and "\n" not in line


def test_resource_is_the_one_that_takes_most_of_the_step():
    slow = replace(H100, network_bytes_per_s=1e5, link_bytes_per_s=1e5)
    assert advise(layout(device=slow), slow).resource == "network"
    waiting = layout("parallel.pp=4", "schedule.micro_batch_size=8", "cluster.num_workers=4")
    time = replace(waiting.time, bubble_s=10.0)
    assert advise(replace(waiting, time=time), H100).resource == "pipeline"
    shared = advise(layout("parallel.dp=4", device=CPU), CPU)
    assert shared.resource == "cores"
    assert "cores bind: " in advice_line(shared, layout("parallel.dp=4", device=CPU), CPU)


def test_layout_that_does_not_fit_is_told_one_that_does():
    found = layout("parallel.pp=1", "parallel.dp=2")
    least = memory_use(
        layout("parallel.pp=1", "parallel.dp=2", "parallel.sharding=parameters").plan
    )
    small = replace(H100, memory_bytes=(least.total_bytes + found.memory.total_bytes) // 2)
    advice = advise(found, small)
    assert advice.resource == "memory" and advice.changes
    assert "memory binds: a rank needs" in advice_line(advice, found, small)


def test_fastest_layout_is_left_alone():
    best = layout("parallel.pp=1", "schedule.micro_batch_size=8", "memory.recompute=none",
                  "cluster.num_workers=1")  # fmt: skip
    while (advice := advise(best, H100)).changes:
        best = layout("parallel.pp=1", "schedule.micro_batch_size=8", *advice.changes)
    assert "no single change" in advice_line(advice, best, H100)
