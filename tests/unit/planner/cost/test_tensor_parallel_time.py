"""Exposed traffic over tp: the closed forms are those of a replay block by block."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymega.api import load_job
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.memory.activation_shape import activation_shape
from raymega.planner.cost.end_times import tower_time
from raymega.planner.cost.tensor_parallel_time import (
    ProductPair,
    ProductTime,
    _exposed_s,
    tensor_parallel_traffic,
)
from raymega.planner.kernels.system_traits import RAYMEGA
from tests.support.jobs import make_test_plan

H100 = CATALOGUE["h100"]
SEVEN_B = Path(__file__).parents[4] / "jobs" / "llama-7b-16gpu.yaml"
SLOW = ProductTime(forward_s=1.0, input_s=1.0, weight_s=1.0)
"""Products that take far longer than any message here."""
PAIRS = [ProductPair(SLOW, SLOW)] * 2
times = st.floats(0.0, 2.0)


@given(message=times, product=times, count=st.integers(1, 8), before=times)
def test_a_gather_is_exposed_as_a_replay_of_its_blocks_says(message, product, count, before):
    end = before
    for block in range(1, count + 1):
        end = max(end, block * message / count) + product / count
    exposed = _exposed_s(message, product, count, before=before)
    assert exposed == pytest.approx(end - before - product, abs=1e-9)


@given(message=times, product=times, count=st.integers(1, 8))
def test_a_sum_is_exposed_as_a_gather(message, product, count):
    end = 0.0
    for block in range(1, count + 1):
        end = max(end, block * product / count) + message / count
    assert _exposed_s(message, product, count) == pytest.approx(end - product, abs=1e-9)


def shape_of(*overrides: str):
    grid = ("cluster.num_workers=grid", "parallel.tp=8", "parallel.dp=2")
    return activation_shape(load_job(SEVEN_B, [*grid, *overrides]))


def traffic(*overrides: str, system=RAYMEGA):
    return tensor_parallel_traffic(shape_of(*overrides), H100, system, pairs=PAIRS)


def test_blocks_hide_all_but_a_quarter_of_a_message_behind_slow_products():
    cut = "parallel.sequence_parallel=true"
    apart, beside = traffic(cut, "parallel.tp_comm_overlap=false"), traffic(cut)
    message = apart.forward_s / 4
    assert beside.forward_s == pytest.approx(message) and beside.backward_s == pytest.approx(0.0)
    assert apart.backward_s == pytest.approx(2 * message)
    # other systems and fp8 products have no blocks
    others = replace(RAYMEGA, makes_steps=False)
    assert traffic(cut, system=others).forward_s == pytest.approx(apart.forward_s)
    assert traffic(cut, "precision.fp8=rowwise").forward_s > apart.forward_s


def test_a_rank_alone_sends_nothing():
    alone = tensor_parallel_traffic(shape_of("parallel.tp=1"), H100, RAYMEGA, pairs=PAIRS)
    assert alone.forward_s == alone.backward_s == 0


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_tower_that_tp_cuts_sums_each_block_twice_in_each_pass(recompute):
    tower = "model.vision={kind: clip, image_size: 8, patch_size: 4, num_layers: 4, hidden_size: 16, num_heads: 8, "
    tower += "ffn_hidden_size: 32, image_token_id: 255, tensor_parallel: "
    wide = ("model.num_heads=8", "model.num_kv_heads=8", "model.vocab_size=256", "data.seq_len=32")

    def passes(is_cut, latency_s):
        options = (f"{tower}{is_cut}}}", "parallel.tp=8", f"memory.recompute={recompute}")
        shape = activation_shape(make_test_plan(*wide, *options).job)
        fitted = replace(H100.fitted, link_latency_s=latency_s)
        return np.array(tower_time(shape, replace(H100, fitted=fitted)))

    # three blocks that run; an all-reduce over 8 ranks has twice three latencies
    sums = 3 * 2 * 2 * 3 * np.array([1, 2 if recompute == "full" else 1])
    np.testing.assert_allclose(passes("true", 1.0) - passes("true", 0.0), sums)
    assert (passes("false", 1.0) == passes("false", 0.0)).all()
