"""Times and classes of stages whose blocks differ."""

import pytest

from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.memory.activation_bytes import stage_activations
from raymega.plan.memory.activation_shape import activation_shape
from raymega.plan.memory.state_bytes import rank_elements
from raymega.plan.run_plan import make_plan
from raymega.planner.cost.rank_classes import rank_kinds
from raymega.planner.cost.step_time import stage_times, step_time
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
