"""Costs of context parallelism: by hand, against the counted bytes, and as the sequence grows with cp."""

import pytest

from raymega.plan.hardware.lookup import ROUND_H100
from raymega.plan.memory.activation_shape import activation_shape
from raymega.planner.cost.context_cost import context_costs, shape_cost
from tests.unit.verify.jobs import make_job

MIB = 2**20


def _job(cp, *overrides, tokens=1024):
    """A rank has ``tokens`` tokens, 4 heads of 64 and float32, as in benchmarks/context_parallel.py."""
    return make_job(
        f"parallel.cp={cp}", f"data.seq_len={tokens * cp}", f"model.max_positions={tokens * cp}",
        "model.num_heads=4", "model.num_kv_heads=4", "model.hidden_size=256", "parallel.pp=1",
        "schedule.micro_batch_size=1", "precision.dtype=float32", *overrides,
    )  # fmt: skip


def _cost(job, method):
    return shape_cost(activation_shape(job), method)


@pytest.mark.parametrize("cp, method, sent", [
    (2, "ring", 6), (2, "all_gather", 6), (2, "all_to_all", 4),
    (4, "ring", 18), (4, "all_gather", 18), (4, "all_to_all", 6),
])  # fmt: skip
def test_bytes_are_those_that_the_benchmark_counts(cp, method, sent):
    cost = _cost(_job(cp), method)
    assert cost.inner_bytes + cost.outer_bytes == sent * MIB


def test_memory_is_flat_but_for_gathered_keys():
    for method, growth in (("ring", 1), ("all_to_all", 1), ("all_gather", 4)):
        small, large = (_cost(_job(cp), method).passing_bytes for cp in (2, 8))
        assert large == growth * small, method


def test_work_is_equal_and_grows_with_the_sequence():
    costs = context_costs(_job(4))
    assert [cost.method for cost in costs] == ["ring", "all_gather", "all_to_all", "hybrid"]
    assert {cost.flops for cost in costs} == {3.5 * 4 * 1024 * 4096 / 2 * 256}
    assert _cost(_job(4), "ring").flops == 2 * _cost(_job(2), "ring").flops


def test_ways_that_the_heads_forbid_are_left_out():
    job = _job(8)
    assert [cost.method for cost in context_costs(job)] == ["ring", "all_gather", "hybrid"]
    assert context_costs(make_job()) == ()


def test_seconds_count_what_work_does_not_hide():
    job = _job(4, tokens=8192)
    ring, gathered = (_cost(job, method) for method in ("ring", "all_gather"))
    near, far = (ring.seconds(ROUND_H100, span=span) for span in (8, 16))
    assert near == ring.flops / (989e12 * 0.4) and far >= near
    assert gathered.seconds(ROUND_H100, span=16) >= far
    short = [_cost(_job(4), method) for method in ("ring", "all_gather")]
    less, more = (cost.seconds(ROUND_H100, span=16) for cost in short)
    assert less == pytest.approx(18 * MIB / 50e9) and more == less
    exchange = _cost(_job(4), "all_to_all")
    for span, rate in ((8, 450e9), (16, 50e9)):
        assert exchange.seconds(ROUND_H100, span=span) == pytest.approx(
            exchange.flops / (989e12 * 0.4) + 6 * MIB / rate
        )


def test_heads_are_exchanged_inside_a_node_by_as_many_neighbours_as_fit_there():
    exchange, hybrid = (_cost(_job(4), method) for method in ("all_to_all", "hybrid"))
    assert (exchange.inner_share, hybrid.inner_share) == (1, 1 / 2)
    far = exchange.exposed_s(ROUND_H100, span=16) / exchange.exposed_s(ROUND_H100, span=8)
    assert far == pytest.approx(450 / 50)
    inner = hybrid.inner_bytes / 450e9
    ring = max(0.0, hybrid.outer_bytes / 50e9 - hybrid.flops / (989e12 * 0.4))
    assert hybrid.exposed_s(ROUND_H100, span=16) == pytest.approx(inner + ring)
