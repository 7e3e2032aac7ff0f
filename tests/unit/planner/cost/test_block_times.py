"""Times of stages whose blocks differ in size."""

import pytest

from raymega.plan.hardware.catalog import CATALOGUE
from raymega.plan.run_plan import make_plan
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
