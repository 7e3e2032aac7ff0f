"""Bytes that kernels hold in a backward, by hand for Llama 2 7B's layers, and against the books' budgets."""

import json
from pathlib import Path

import pytest

from raymega.config.load import parse_mapping
from raymega.plan.memory.activation_bytes import activation_shape, feed_forward_bytes
from raymega.plan.run_plan import make_plan
from raymega.planner.cost.peak_memory import pipeline_memory
from raymega.planner.cost.working_memory import (
    attention_bytes_in_backward,
    feed_forward_bytes_in_backward,
    head_bytes_in_backward,
    logits_copy_bytes,
    transfer_bytes,
)
from tests.cuda_books.layouts import LAYOUTS, job_of

T, D, F, V = 4096, 4096, 11008, 32000
STREAM, HIDDEN = 2 * T * D, 2 * T * F
BUDGETS = json.loads((Path(__file__).parents[3] / "cuda_books" / "budgets.json").read_text())


def _of(name):
    return activation_shape(parse_mapping(job_of(name)).job())


def test_one_rank():
    shape = _of("one rank")
    assert logits_copy_bytes(shape) == T * V * 4
    # the weight's gradient in bfloat16; the input's comes after it
    assert head_bytes_in_backward(shape) == V * D * 2
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
    # product, input's gradient of all tokens, gathered input, and this rank's part of the sum
    assert head_bytes_in_backward(shape) == V // 8 * D * 2 + 2 * STREAM + STREAM // 8
    # the layer before the nonlinearity has the most: the same with gate and up, less the product
    before = 2 * F // 8 * D * 2 + 2 * STREAM + STREAM // 8 - HIDDEN // 8
    assert feed_forward_bytes_in_backward(shape, has_experts=False) == STREAM // 8 + before


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


@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_peak_is_that_of_torchs_allocator(name):
    use = pipeline_memory(make_plan(parse_mapping(job_of(name)).job()))[0][0]
    planned = use.state_bytes + use.activation_bytes
    assert planned == pytest.approx(BUDGETS[name]["peak_bytes"], rel=0.01)
