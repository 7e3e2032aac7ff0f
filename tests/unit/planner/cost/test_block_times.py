"""Times and classes of stages whose blocks differ."""

import pytest

from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.memory.activation_bytes import stage_activations
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import rank_elements
from raymega.plan.run_plan import make_plan
from raymega.planner.cost.block_times import block_times
from raymega.planner.cost.rank_classes import rank_kinds
from raymega.planner.cost.step_time import stage_times, step_time
from raymega.planner.kernels.system_traits import RAYMEGA
from tests.unit.verify.jobs import make_job

SIZES = [
    "model.hidden_size=1024", "model.num_layers=8", "model.ffn_hidden_size=8192", "model.max_positions=4096",
    "model.layer_sizes={ffn_hidden_size: [1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192]}",
    "data.seq_len=4096", "parallel.pp=4", "precision.dtype=bfloat16",
]  # fmt: skip


def _plan(stages):
    return make_plan(make_job(*SIZES, f"parallel.stages={stages}"))


def test_a_stage_of_wide_blocks_takes_longer():
    first, second, third, last = stage_times(_plan("even"), CATALOGUE["h100"])
    assert first.total_s < second.total_s < third.total_s < last.total_s
    # forward of two blocks: attention is alike, and widths add up to 3,072, 7,168 and 11,264
    steps = second.forward_s - first.forward_s, third.forward_s - second.forward_s
    assert steps[0] == pytest.approx(steps[1], rel=0.1)


ALIKE = [each for each in SIZES if "layer_sizes" not in each]
MIXED = {
    "windows": ["model.attention={layer_types: [sliding, sliding, sliding, sliding, full, full, full, full], sliding_window: 256}"],
    "states": [
        "model.family=qwen3_next",
        "model.attention={layer_types: [full, full, full, full, gated_delta_net, gated_delta_net, gated_delta_net, gated_delta_net]}",
        "model.linear_attention={num_key_heads: 4, num_value_heads: 8, key_head_dim: 128, value_head_dim: 128}",
    ],
    "parts": [
        "model.family=nemotron_h",
        "model.attention={layer_types: [mamba2, mamba2, no_positions, no_positions, feed_forward, feed_forward, mamba2, feed_forward]}",
        "model.linear_attention={num_key_heads: 4, num_value_heads: 8, key_head_dim: 128, value_head_dim: 128}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXED)
def test_stages_of_unlike_layers_have_times_of_their_own_and_add_up_to_the_whole(kind):
    plan = make_plan(make_job(*ALIKE, *MIXED[kind]))
    times = stage_times(plan, CATALOGUE["h100"])
    inner = [times[1].total_s, times[2].total_s]
    assert inner[0] != pytest.approx(inner[1], rel=0.02), "a mean would make them alike"
    shape = activation_shape(plan.job)
    blocks = block_times(shape, CATALOGUE["h100"], RAYMEGA)
    mean = plan.job.model.num_layers * blocks.dense.forward_s
    found = sum(
        count * each.forward_s
        for stage in plan.stages
        for count, each in blocks.of_stage(shape, stage)
    )
    assert found == pytest.approx(mean, rel=1e-9)


def test_auto_gives_wide_blocks_to_smaller_stages():
    auto = _plan("auto")
    counts = [stage.num_layers for stage in auto.stages]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    device = CATALOGUE["h100"]
    assert step_time(auto, device).total_s < step_time(_plan("even"), device).total_s


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("verify.yaml", ["model.num_layers=8", "parallel.pp=4", "model.freeze=[layers.2.*]"]),
        ("verify.yaml", ["model.num_layers=8", "parallel.pp=4", "model.lora.r=4", "model.lora.target_modules=[layers.2.*]"]),
        ("t5.yaml", ["model.num_layers=12", "model.encoder_decoder.num_encoder_layers=6", "parallel.pp=6"]),
    ],
    ids=["freeze", "lora", "encoder end"],
)  # fmt: skip
def test_ranks_of_a_class_hold_and_keep_equally_much(file, options):
    plan = make_plan(make_job(*options, file=file))
    shape = activation_shape(plan.job)
    for kind in rank_kinds(plan):
        kept = [stage_activations(shape, stage) for stage in kind.stages]
        for pp_rank in kind.pp_ranks:
            stages = plan.chunks_of(pp_rank)
            assert rank_elements(plan.job, stages, plan.grid) == kind.elements
            assert [stage_activations(shape, stage) for stage in stages] == kept
