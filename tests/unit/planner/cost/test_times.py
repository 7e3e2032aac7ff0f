"""Times of kernels, links and steps: limits that do not depend on fitted constants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymega.api import load_job
from raymega.errors import PlanError
from raymega.plan.hardware.catalog import CATALOGUE, accelerator
from raymega.plan.memory.activation_bytes import vocabulary_rows
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import rank_elements
from raymega.plan.run_plan import make_plan
from raymega.planner.cost.context_cost import METHODS, shape_cost
from raymega.planner.cost.data_parallel_time import BUCKETS, CONTENTION, data_parallel_s
from raymega.planner.cost.end_times import head_time
from raymega.planner.cost.layer_time import layer_time
from raymega.planner.cost.peak_memory import micro_batches_in_flight
from raymega.planner.cost.step_time import step_time, work_s
from raymega.planner.cost.working_memory import head_bytes_in_backward
from raymega.planner.kernels.collective_time import all_reduce_s, gather_s, make_span, message_s
from raymega.planner.kernels.kernel_time import (
    STREAM_SHARE,
    attention_s,
    matmul_s,
    memory_s,
    stream_s,
)
from raymega.planner.kernels.system_traits import RAYMEGA
from raymega.schedule.instructions import FREES_ACTIVATIONS, Op
from raymega.schedule.order import make_sizes
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.table import SCHEDULES, make_schedule

H100 = CATALOGUE["h100"]
JOBS = Path(__file__).parents[4] / "jobs"
SEVEN_B = JOBS / "llama-7b-16gpu.yaml"


def plan_of(*overrides: str):
    return make_plan(load_job(SEVEN_B, ["cluster.num_workers=grid", *overrides]))


def test_a_large_product_comes_near_its_share_of_the_peak():
    size = 2**15
    rate = 2 * size**3 / matmul_s(H100, size, size, size)
    assert 0.95 < rate / (H100.peak_16_bit_flops * H100.fitted.matmul_share) < 1


def test_a_thin_product_is_bound_by_memory():
    seconds = matmul_s(H100, 1, 8192, 8192)
    assert seconds >= stream_s(H100, 2 * 8192 * 8192)


def test_causal_attention_costs_half_of_full():
    full = 4 * 2**20 * 4096 * 128 / H100.attention_flops
    causal = attention_s(H100, 2**20, 4096, 128)
    assert causal - H100.fitted.launch_s == pytest.approx(full / 2)


def test_a_ring_moves_what_the_published_formula_says():
    """(n - 1) / n of the bytes through each rank, twice for an all-reduce (Patarasuk and Yuan 2009)."""
    quiet = replace(H100, fitted=replace(H100.fitted, link_latency_s=0.0, link_share=1.0))
    span = make_span(quiet, size=8, stride=1)
    assert gather_s(quiet, span, 450e9) == pytest.approx(7 / 8)
    assert all_reduce_s(quiet, span, 450e9) == pytest.approx(2 * 7 / 8)


def test_more_ranks_on_a_node_bring_more_of_the_network():
    apart, together = (make_span(H100, size=16, stride=stride) for stride in (8, 1))
    assert not apart.is_inside and apart.per_node == 1 and together.per_node == 8
    assert gather_s(H100, together, 1e9) < gather_s(H100, apart, 1e9) / 4


def test_a_message_inside_a_node_is_faster():
    assert message_s(H100, 1e8, is_inside=True) < message_s(H100, 1e8, is_inside=False)


def test_an_unknown_gpu_is_refused_by_name():
    with pytest.raises(PlanError, match="--gpu h1000"):
        accelerator("h1000")


def test_full_recompute_runs_the_forward_once_more():
    shape = activation_shape(plan_of().job)
    block = layer_time(shape, H100, RAYMEGA)
    _, plain = block.pass_s("none")
    _, again = block.pass_s("full")
    assert again - plain == pytest.approx(block.forward_s + block.tensor_parallel_s)


def test_attention_for_the_generation_before_reaches_its_own_share():
    newest, older = (
        layer_time(
            activation_shape(plan_of().job),
            H100,
            replace(RAYMEGA, has_newest_attention=new, makes_steps=False),
        )
        for new in (True, False)
    )
    ratio = H100.fitted.attention_share / H100.fitted.older_attention_share
    assert older.attention_s / newest.attention_s == pytest.approx(ratio, rel=1e-2)
    assert CATALOGUE["a100"].with_older_attention() is CATALOGUE["a100"]


def test_products_that_selective_recompute_makes_again_are_those_of_the_system():
    shape = activation_shape(plan_of().job)
    parts = ("norm", "activation")
    nothing, second, every = (
        layer_time(shape, H100, replace(RAYMEGA, remakes=remakes)).pass_s("selective", parts)[1]
        for remakes in ("nothing", "every_second", "products")
    )
    assert nothing < second < every
    # Of q, k, v, out, gate, up and down those of k, out and up, of 4 + 3 x 2.6875 widths squared.
    assert 0.3 < (second - nothing) / (every - nothing) < 0.5


def test_kernels_of_single_operations_cost_what_they_read_and_write():
    shape = activation_shape(plan_of().job)
    system = replace(RAYMEGA, makes_steps=False)
    fused, apart = (
        layer_time(shape, H100, replace(system, fuses_kernels=f)) for f in (True, False)
    )
    stream = 2 * shape.stream_tokens * shape.model.hidden_size * 32
    rate = H100.memory_bytes_per_s * STREAM_SHARE
    assert apart.norms_s - fused.norms_s == pytest.approx(stream / rate)
    assert apart.activation_s > fused.activation_s
    assert apart.forward_s - fused.forward_s > apart.norms_s - fused.norms_s


def block_of(device, *overrides: str):
    return layer_time(activation_shape(plan_of(*overrides).job), device, RAYMEGA)


def test_fused_kernels_save_the_passes_over_memory_that_steps_make():
    device = CATALOGUE["cpu"]
    shape = activation_shape(plan_of().job)
    stepped, fused = block_of(device, "run.kernels=eager"), block_of(device, "run.kernels=compile")
    hidden = shape.tokens * shape.model.ffn_hidden_size / shape.parallel.tp
    gate = stream_s(device, 2 * hidden * shape.element)
    assert stepped.activation_s - fused.activation_s == pytest.approx(gate)
    assert stepped.norms_s == fused.norms_s
    turned = shape.model.num_heads + shape.model.kv_heads
    turned *= shape.tokens * shape.model.head_width / shape.parallel.tp
    turn = stream_s(device, 3 * turned * shape.element)
    saved = stepped.forward_s - fused.forward_s
    assert saved == pytest.approx(gate + turn)
    assert stepped.backward_s - fused.backward_s == pytest.approx(2 * saved)
    assert fused == layer_time(shape, device, replace(RAYMEGA, makes_steps=False))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_fused_loss_leaves_logits_in_their_format(dtype):
    stepped, fused = (
        activation_shape(plan_of(f"precision.dtype={dtype}", f"run.kernels={kernels}").job)
        for kernels in ("eager", "compile")
    )
    logits = fused.tokens * fused.model.table_rows / fused.parallel.tp
    saved = [a - b for a, b in zip(head_time(stepped, H100), head_time(fused, H100), strict=True)]
    once = (
        memory_s(H100, logits * (8 - fused.element)),
        memory_s(H100, logits * (4 - fused.element)),
    )
    assert saved == [pytest.approx(each) for each in once]


def test_fused_kernels_change_nothing_where_torch_has_one_kernel_already():
    gpt2 = ("model.family=gpt2", "model.num_kv_heads=num_heads")
    for name in ("h100", "cpu"):
        device = CATALOGUE[name]
        assert block_of(device, *gpt2) == block_of(device, *gpt2, "run.kernels=compile")


def cp_layer(method: str, *, tokens: int):
    sizes = (f"data.seq_len={2 * tokens}", f"model.max_positions={2 * tokens}")
    plan = plan_of(*sizes, "parallel.cp=2", "parallel.tp=4", f"parallel.cp_method={method}")
    return layer_time(activation_shape(plan.job), H100, RAYMEGA)


def test_a_ring_hides_behind_attention_what_other_ways_wait_for():
    waits = {m: cp_layer(m, tokens=16384).context_parallel_s for m in METHODS if m != "hybrid"}
    assert waits["ring"] < waits["all_gather"]
    assert waits["all_to_all"] > 0
    kv_gradients = 16384 * 2 * 8 * 128 * 3 * 4
    assert waits["ring"] == pytest.approx(memory_s(H100, kv_gradients) / 2)


def test_ranks_of_a_context_parallel_group_share_attention_evenly():
    """Causal: half of the square, whatever cp; as many tokens a rank of twice the sequence.

    Ranks that share a sequence have the attention of the generation before, one alone the newest.
    """
    alone = plan_of("data.seq_len=8192", "model.max_positions=8192", "parallel.tp=4")
    older = replace(RAYMEGA, makes_steps=False)
    single = layer_time(activation_shape(alone.job), H100, older).attention_s
    assert layer_time(activation_shape(alone.job), H100, RAYMEGA).attention_s < single
    shared = cp_layer("ring", tokens=8192).attention_s
    assert shared - H100.fitted.launch_s == pytest.approx(2 * (single - H100.fitted.launch_s))


def test_waiting_is_that_of_the_formulas_of_context_parallelism():
    job = plan_of("parallel.cp=4", "parallel.tp=4", "parallel.dp=1").job
    shape = activation_shape(job)
    cost = shape_cost(shape, "ring")
    device = H100.with_older_attention()
    expected = cost.exposed_s(device, span=16) + memory_s(H100, cost.added_bytes)
    assert layer_time(shape, H100, RAYMEGA).context_parallel_s == pytest.approx(expected / 2)


def test_copies_of_a_node_s_shards_are_summed_over_the_network():
    sharded = "parallel.sharding=optimizer", "parallel.data_parallel_shard_degree=8"
    plan = plan_of("parallel.tp=1", "parallel.pp=1", "parallel.dp=16", *sharded)
    slow = replace(H100, network_bytes_per_s=H100.network_bytes_per_s / 1000)
    fast_s, slow_s = (step_time(plan, device).data_parallel_s for device in (H100, slow))
    held = rank_elements(plan.job, plan.stages, plan.grid)
    sent = 4 * held.total / 8  # two nodes: half of a gradient's part each way, twice
    later = sent / slow.reached_network_bytes_per_s - sent / H100.reached_network_bytes_per_s
    assert slow_s - fast_s == pytest.approx(later)


@pytest.mark.parametrize("overrides", [(), ("parallel.dp=8", "parallel.pp=2")], ids=str)
def test_parts_add_up_to_the_step(overrides):
    time = step_time(plan_of(*overrides), H100)
    parts = [getattr(time, name) for name in time.__slots__]
    assert time.total_s == pytest.approx(sum(parts)) and min(parts) >= 0


def test_workers_that_share_cores_wait_for_the_work_of_all_and_for_nothing_else():
    """Two cores: four ranks' work over two, or the longest chain; enough cores: as on devices apart."""
    sizes = ("parallel.tp=1", "parallel.pp=4", "parallel.dp=1", "data.global_batch_size=4")
    plan = plan_of(*sizes, "schedule.micro_batch_size=1")
    cores = {n: replace(CATALOGUE["cpu"], shared_cores=n) for n in (1.0, 2.0, 64.0)}
    total = {n: step_time(plan, device).total_s for n, device in cores.items()}
    work = 4 * work_s(plan, cores[1.0])
    assert total[1.0] == pytest.approx(work)
    assert total[64.0] == pytest.approx(
        step_time(plan, replace(cores[1.0], shared_cores=0.0)).total_s
    )
    assert total[64.0] <= total[2.0] == pytest.approx(max(total[64.0], work / 2))


def test_traffic_that_hides_on_a_gpu_is_work_where_cores_are_shared():
    plan = plan_of("parallel.tp=1", "parallel.pp=1", "parallel.dp=4", "data.global_batch_size=4")
    alone = replace(CATALOGUE["cpu"], shared_cores=1.0)
    slow_links = replace(alone, link_bytes_per_s=alone.link_bytes_per_s / 2)
    assert work_s(plan, slow_links) > work_s(plan, alone)


def test_twice_the_batch_takes_twice_the_compute():
    once, twice = (
        step_time(plan_of(f"data.global_batch_size={size}"), H100).compute_s for size in (512, 1024)
    )
    assert twice == pytest.approx(2 * once)


@given(
    name=st.sampled_from(["1f1b", "gpipe"]),
    pp=st.integers(2, 8),
    chunks=st.integers(1, 4),
    groups=st.integers(1, 6),
)
def test_the_bubble_is_the_simulated_one(name, pp, chunks, groups):
    chunks = chunks if name == "1f1b" else 1
    micro_batches = groups * pp
    sizes = _sizes(pp, chunks, micro_batches)
    simulated = simulate(make_schedule(name, sizes), Durations()).bubble
    assert simulated == pytest.approx((pp - 1) / chunks / micro_batches)


@given(
    name=st.sampled_from([name for name in SCHEDULES if name not in ("zb_auto", "interleaved")]),
    pp=st.integers(1, 8),
    chunks=st.integers(1, 3),
    micro_batches=st.integers(1, 24),
)
def test_as_many_in_flight_as_the_closed_form_says(name, pp, chunks, micro_batches):
    kind = SCHEDULES[name]
    chunks = min(max(chunks, kind.least_chunks), kind.most_chunks)
    program = make_schedule(name, _sizes(pp, chunks, micro_batches))
    for pp_rank, schedule in enumerate(program.lists):
        held = peak = 0
        for task in schedule:
            held += (task.op is Op.FORWARD) - (task.op in FREES_ACTIVATIONS)
            peak = max(peak, held)
        bound = micro_batches_in_flight(
            name, pp=pp, pp_rank=pp_rank, chunks=chunks, num_micro_batches=micro_batches
        )
        assert peak <= bound, (name, pp_rank)
        if micro_batches >= 2 * pp:
            assert peak == bound, (name, pp_rank)


def _sizes(pp: int, chunks: int, micro_batches: int):
    return make_sizes(
        pp=pp,
        chunks=chunks,
        num_micro_batches=micro_batches,
        microbatch_group_size_per_vp_stage="pp",
        max_in_flight_microbatches="pp",
    )


def test_hidden_traffic_slows_what_it_hides_behind_except_on_a_cpu():
    sharded = "parallel.tp=1", "parallel.pp=1", "parallel.dp=16", "parallel.sharding=optimizer"
    plan = plan_of(*sharded)
    held = rank_elements(plan.job, plan.stages, plan.grid)

    def exposed_s(device, backward_s):
        return data_parallel_s(plan, held, device, RAYMEGA, backward_s=backward_s)

    ends = 1 / BUCKETS
    hidden, bare = exposed_s(H100, 1e9), exposed_s(H100, 0.0)
    assert hidden == pytest.approx(bare * (ends + CONTENTION * (1 - ends)))
    cpu = replace(CATALOGUE["cpu"], link_bytes_per_s=1e9)
    assert exposed_s(cpu, 1e9) == pytest.approx(exposed_s(cpu, 0.0) * ends)


def test_traffic_of_fused_kernels_on_a_gpu_is_counted_in_full():
    stepped, fused = block_of(H100, "run.kernels=eager"), block_of(H100, "run.kernels=auto")
    assert fused == block_of(H100, "run.kernels=compile") == block_of(H100)
    assert fused.norms_s / stepped.norms_s == pytest.approx(H100.fitted.memory_share / STREAM_SHARE)
    assert block_of(H100, "run.deterministic=true") == stepped


@pytest.mark.parametrize("is_cut", [True, False])
def test_sums_over_tp_hide_behind_weight_gradients(is_cut):
    grid = ("parallel.dp=2", "parallel.tp=8")
    if is_cut:
        grid += ("parallel.sequence_parallel=true", "parallel.tp_comm_overlap=false")
    block = block_of(H100, *grid)
    # with sequence parallelism only the reduce-scatters of the inputs' gradients are sums
    most = block.tensor_parallel_s * (0.5 if is_cut else 1.0)
    assert 0.5 * most < block.hidden_s <= most
    forward, backward = block.pass_s("none")
    assert forward == block.forward_s + block.tensor_parallel_s
    assert backward == block.backward_s + block.tensor_parallel_s - block.hidden_s
    shape = activation_shape(plan_of(*grid).job)
    assert layer_time(shape, H100, replace(RAYMEGA, makes_steps=False)).hidden_s == 0


def test_a_head_of_two_sides_reads_the_decoders_tokens():
    shape = activation_shape(load_job(JOBS / "t5.yaml"))
    assert head_time(shape, H100) == head_time(replace(shape, seq_len=2 * shape.seq_len), H100)
    assert head_bytes_in_backward(shape) < 64 * shape.model.hidden_size * shape.element * 2


def test_a_frozen_head_has_no_weight_gradient():
    whole, tuned = (load_job(SEVEN_B, more) for more in ([], ["model.lora.r=16"]))
    shape = activation_shape(tuned)
    forward, backward = head_time(activation_shape(whole), H100)
    weights_s = matmul_s(
        H100, shape.model.hidden_size, shape.tokens, vocabulary_rows(shape), element=shape.element
    )
    assert head_time(shape, H100) == pytest.approx((forward, backward - weights_s))
