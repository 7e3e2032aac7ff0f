"""The replay on traces written by hand, the rates, and the budgets without a CUDA build of torch."""

import json

import pytest

from raymega.plan.hardware.catalog import CATALOGUE
from raymega.planner.cost.simulated_step import played_step
from tests.cuda_books.roofline.__main__ import BUDGETS, changes
from tests.cuda_books.roofline.jobs import CASES, busiest_rank, plan_of
from tests.cuda_books.roofline.rates import (
    ATTENTION_FLOPS,
    LAUNCH_S,
    LINK_BYTES_PER_S,
    MEMORY_BYTES_PER_S,
    NETWORK_BYTES_PER_S,
    collective_s,
    operation_s,
)
from tests.cuda_books.roofline.replay import read_costs, replay, totals_of

PHASE = "1\t7\tnote\tphase|passes"
LONG = 700e12  # FLOPs of a product that takes a second
PLAN_ERROR = 0.1
GATHERED = 2 * LINK_BYTES_PER_S  # bytes of a gather over 2 ranks that takes a second


def product(flops=LONG, stream="0xa"):
    return [f"1\t7\tgemm\t{stream}\tgemm", f"1\t7\tnote\tcost|product|mm|0|{flops:.0f}"]


def kernel(num_bytes, stream="0xa"):
    return [
        f"1\t7\tkernel\t{stream}\tadd",
        f"1\t7\tnote\tcost|element-wise|add|{num_bytes:.0f}|0",
    ]


def gather(num_bytes=GATHERED):
    """A gather on a stream of its own, behind the products so far; event 0x2 is its end."""
    return [
        "1\t7\tnote\tgroup|tp|2|2",
        "1\t7\trecord\t0xa\t0x1",
        "1\t7\twait\t0xb\t0x1",
        f"1\t7\tnccl\t0xb\tall_gather\t0x0\t1\t0x0\t{num_bytes:.0f}\t0xc\t2",
        "1\t7\trecord\t0xb\t0x2",
    ]


WAIT = "1\t7\twait\t0xa\t0x2"


def parts_of(*lines):
    entries = read_costs([PHASE, *lines], tp=1)
    return {name: pytest.approx(s, abs=1e-3) for name, s in replay(entries).items() if s > 1e-3}


def test_a_gather_that_is_waited_for_at_once_is_exposed():
    parts = parts_of(*product(), *gather(), WAIT, *product())
    assert parts == {"products": 2.0, "messages tp": 1.0}


def test_a_gather_behind_a_product_costs_nothing():
    parts = parts_of(*product(), *gather(), *product(), WAIT, *product())
    assert parts == {"products": 3.0}
    half = parts_of(*product(), *gather(), *product(LONG / 2), WAIT, *product())
    assert half == {"products": 2.5, "messages tp": 0.5}


def test_launches_count_where_the_device_waits_for_the_host():
    few = [line for _ in range(1000) for line in kernel(0)]
    assert parts_of(*product(), *few) == {"products": 1.0}
    assert parts_of(*few, *product()) == {"products": 1.0, "launches": 1000 * LAUNCH_S}
    # a wait of the host ends the lead that it had
    waited = parts_of(*product(), "1\t7\tsync\tdevice", *few, *product())
    assert waited == {"products": 2.0, "launches": 1000 * LAUNCH_S}


def test_a_wait_of_a_thread_that_launches_nothing_holds_nobody_up():
    few = [line for _ in range(1000) for line in kernel(0)]
    assert parts_of(*product(), "1\t9\tsync\tdevice", *few) == {"products": 1.0}


def test_an_exchange_is_one_collective_of_all_its_calls():
    calls = [
        f"1\t7\tnccl\t0xb\tsend\t0x0\t{NETWORK_BYTES_PER_S:.0f}\t0x0\t0\t0xc\t2" for _ in range(2)
    ]
    entries = read_costs(["1\t7\tnote\tgroup|ep|2|1", *calls], tp=1)
    assert [entry.seconds for entry in entries] == [pytest.approx(1.0)]


def test_rates_are_those_of_the_table():
    assert operation_s("product", 0, 700e12, tp=1) == operation_s("product", 0, 600e12, tp=8) == 1
    assert operation_s("product", MEMORY_BYTES_PER_S, 1.0, tp=1) == 1
    for kind, rate in ATTENTION_FLOPS.items():
        assert operation_s(kind, 0, rate, tp=1) == 1
    ring = collective_s("all_gather", 16 * NETWORK_BYTES_PER_S, ranks=16, per_node=8)
    assert ring == pytest.approx(15 / 8)
    assert collective_s("all_reduce", LINK_BYTES_PER_S, ranks=2, per_node=2) == 1


def test_bytes_and_launches_are_those_of_the_passes():
    lines = [*kernel(5), PHASE, *kernel(7), *product(), *gather()]
    assert totals_of(read_costs(lines, tp=1), phase="passes") == {
        "launches": 2, "element_bytes": 7, "messages": 1, "message_bytes": GATHERED,
    }  # fmt: skip


def test_each_case_has_a_budget_and_a_change_is_told():
    budgets = json.loads(BUDGETS.read_text())
    assert list(CASES) == list(budgets)
    assert changes("a", {"x": 1.0}, {"x": 2.0}) == ["a: x 1.0, budget 2.0"]
    assert changes("a", {"x": 1.0}, {"x": 1.0}) == []


def test_the_rank_that_runs_has_the_head():
    for name in CASES:
        plan = plan_of(name)
        assert any(stage.is_last for stage in plan.stages_of(busiest_rank(plan)))
    assert plan_of("llama 7B, tp8 sp, kernels=compile").job.run.kernels == "compile"


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_within_a_tenth_of_the_roofline(name):
    budget = json.loads(BUDGETS.read_text())[name]
    planned = played_step(plan_of(name), CATALOGUE["h100"]).total_s
    assert 1e3 * planned == pytest.approx(budget["plan_ms"], abs=0.1)
    assert budget["plan_ms"] == pytest.approx(budget["step_ms"], rel=PLAN_ERROR)


def test_steps_are_as_fast_as_they_were_made():
    budgets = json.loads(BUDGETS.read_text())
    one_rank, experts = budgets["llama 7B, tp1 dp8"], budgets["mixtral 8x7B, pp2 dp32 ep8"]
    assert one_rank["launches_a_layer"] <= 35 and one_rank["element_gb_a_layer"] <= 2.2
    assert one_rank["mfu_percent"] >= 55 and experts["mfu_percent"] >= 45
    assert budgets["llama 7B, tp8 sp"]["mfu_percent"] >= 45
