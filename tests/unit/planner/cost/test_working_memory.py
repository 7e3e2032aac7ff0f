"""Bytes that kernels hold in a backward, by hand for Llama 2 7B's layers, and against the books' budgets."""

from dataclasses import replace
from functools import partial

import pytest

from raymega.config.load import parse_mapping
from raymega.plan.memory.activation_bytes import (
    bytes_to_first_wait,
    feed_forward_bytes,
    layer_bytes,
)
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.run_plan import make_plan
from raymega.planner.cost.peak_memory import pipeline_memory
from raymega.planner.cost.working_memory import (
    attention_bytes_in_backward,
    feed_forward_bytes_in_backward,
    head_bytes_in_backward,
    logits_copy_bytes,
    transfer_bytes,
)
from tests.cuda_books.budgets import PEAK_ERROR, read_budgets
from tests.cuda_books.layouts import LAYOUTS, job_of, rank_of

T, D, F, V = 4096, 4096, 11008, 32000
STREAM, HIDDEN = 2 * T * D, 2 * T * F


def _of(name):
    return activation_shape(parse_mapping(job_of(name)).job())


def test_one_rank():
    shape = _of("one rank")
    assert logits_copy_bytes(shape) == T * V * 4
    # the input's gradient; the weight's is added in float32 by the product
    assert head_bytes_in_backward(shape) == STREAM
    # gradient that arrives; of the product, gate and up, and the sigmoid; less the product
    assert feed_forward_bytes_in_backward(shape, has_experts=False) == STREAM + 3 * HIDDEN
    # gradient that arrives, the output's, q k v's and these joined; less what the feed-forward layer kept
    working = STREAM + STREAM + 2 * 3 * STREAM
    kept = feed_forward_bytes(shape, has_experts=False)
    assert kept == 2 * STREAM + T * 4 + 3 * HIDDEN
    assert attention_bytes_in_backward(shape, has_experts=False) == working - kept
    assert transfer_bytes(shape, num_neighbours=0) == 0


def test_tensor_and_sequence_parallel_gather_inputs_and_gradients():
    shape = _of("tp8 sp")
    assert logits_copy_bytes(shape) == T * V // 8 * 4
    # input's gradient of all tokens, gathered input, and this rank's part of the sum
    assert head_bytes_in_backward(shape) == 2 * STREAM + STREAM // 8
    # the layer before the nonlinearity has the most: the same, less the nonlinearity's output
    before = 2 * STREAM + STREAM // 8 - HIDDEN // 8
    apart = replace(shape, is_tp_overlapped=False)
    assert feed_forward_bytes_in_backward(apart, has_experts=False) == STREAM // 8 + before
    # beside messages a weight's gradient is held back: its layer's gradient, gathered, and input
    held = STREAM + HIDDEN // 8
    assert feed_forward_bytes_in_backward(shape, has_experts=False) == STREAM // 8 + before + held
    attention = partial(attention_bytes_in_backward, has_experts=False)
    assert attention(shape) == attention(apart) + STREAM
    assert attention(_of("tp8 sp fp8")) == attention(
        replace(_of("tp8 sp fp8"), is_tp_overlapped=False)
    )


def test_outer_context_parallel_ranks_add_up_float32_and_keys_pass():
    exchanged, gathered = (
        attention_bytes_in_backward(_of(f"cp4 {method}"), has_experts=False)
        for method in ("all_to_all", "all_gather")
    )
    kv = 2 * T // 4 * D
    q = kv // 2
    passing = 2 * 4 * kv * (2 + 4)  # by rank and in order, values and gradients
    assert gathered - exchanged == passing + (q + kv) * (4 - 2)


def test_float32_has_no_copies_and_adds_up_in_the_product():
    job = job_of("one rank")
    shape = activation_shape(parse_mapping(job | {"precision": {"dtype": "float32"}}).job())
    assert logits_copy_bytes(shape) == 0
    assert head_bytes_in_backward(shape) == 4 * T * D, "the input's gradient"


def test_compiled_kernels_copy_no_logits_and_keep_no_sigmoid():
    job = job_of("one rank")
    job["run"] = {**job["run"], "kernels": "compile"}
    shape = activation_shape(parse_mapping(job).job())
    assert logits_copy_bytes(shape) == 0
    assert feed_forward_bytes_in_backward(shape, has_experts=False) == STREAM + 2 * HIDDEN


@pytest.mark.parametrize(("recompute", "more"), [("none", 1), ("full", 4)])
def test_of_two_passes_that_take_turns_the_forward_is_ahead_by_the_blocks_before_its_first_wait(
    recompute, more
):
    job = job_of("ep4 overlap") | {"memory": {"recompute": recompute}}
    dense = {**job["model"]["moe"], "first_k_dense_replace": 2}
    plan = make_plan(parse_mapping(job | {"model": {**job["model"], "moe": dense}}).job())
    shape = activation_shape(plan.job)
    blocks = 2 * layer_bytes(shape) + layer_bytes(shape, has_experts=True)
    assert bytes_to_first_wait(shape, plan.stages[0]) == blocks
    # the books' own job: its first block has experts; a recomputing backward may be left behind by all four
    plan = make_plan(parse_mapping(job).job())
    alone = {**job, "parallel": {**job["parallel"], "overlap_moe_expert_parallel_comm": False}}
    kept, kept_alone = (
        pipeline_memory(each)[0][0].activation_bytes
        for each in (plan, make_plan(parse_mapping(alone).job()))
    )
    block = STREAM if recompute == "full" else layer_bytes(shape, has_experts=True)
    assert kept == kept_alone + more * block


@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_peak_is_that_of_torchs_allocator(name):
    plan, budget = make_plan(parse_mapping(job_of(name)).job()), read_budgets()[name]
    use = pipeline_memory(plan)[plan.grid.coords(rank_of(name)).pp][0]
    error = use.state_bytes + use.activation_bytes - budget["peak_bytes"]
    assert abs(error) <= PEAK_ERROR * budget["peak_bytes"]
