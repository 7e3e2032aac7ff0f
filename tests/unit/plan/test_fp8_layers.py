"""fp8 in a job: what is refused, what is short for what, what it costs and saves by the planner."""

import pytest

from raymega.config.load import parse_job
from raymega.errors import PlanError
from raymega.plan.hardware.catalog import accelerator
from raymega.plan.memory.state_bytes import rank_state
from raymega.plan.run_plan import make_plan
from raymega.planner.cost.step_time import step_time
from raymega.planner.search.candidates import Space, candidates
from raymega.verify.shrink import shrink_job
from tests.support.jobs import VERIFY, make_test_plan

ROWWISE, TENSORWISE = "precision.fp8=rowwise", "precision.fp8=tensorwise"
LARGE = (
    "model.hidden_size=4096", "model.num_heads=32", "model.num_kv_heads=8", "model.ffn_hidden_size=14336",
    "model.num_layers=8", "data.seq_len=4096", "model.max_positions=4096", "precision.dtype=bfloat16",
    "parallel.pp=1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([ROWWISE, "precision.dtype=float16"], "dtype=float16; .*loss scale.*bfloat16"),
        ([ROWWISE, "precision.fp8_end_blocks=2"], r"num_layers=4 none is left .*; use at most 1"),
        ([ROWWISE, "parallel.tp=4", "model.num_kv_heads=2"], "num_kv_heads=2: .*use one of 1, 2"),
        (
            [TENSORWISE, "parallel.dynamic_cp=true", "parallel.dp=2", "data.packing=best_fit"],
            "dynamic_cp=true with precision.fp8=tensorwise; .*set precision.fp8=rowwise",
        ),
        (["precision.fp8_end_blocks=2"], "it has no effect without precision.fp8=rowwise"),
    ],
)
def test_each_rule_names_its_fact(overrides, message):
    with pytest.raises(PlanError, match=message):
        make_test_plan(*overrides)


def test_dtype_fp8_is_short_for_rows_and_bfloat16():
    job = parse_job(VERIFY, ["precision.dtype=fp8"]).job()
    assert (job.precision.dtype, job.precision.fp8) == ("bfloat16", "rowwise")
    job = parse_job(VERIFY).with_overrides(["precision.dtype=fp8", TENSORWISE]).job()
    assert (job.precision.dtype, job.precision.fp8) == ("bfloat16", "tensorwise")


def test_a_tensors_scale_holds_the_micro_batch_size():
    job = parse_job(VERIFY, [TENSORWISE]).job()
    space = Space(job=job, device=accelerator("h100"), num_devices=2)
    assert {c.schedule.micro_batch_size for c in candidates(space)} == {2}


def test_a_shrunk_job_keeps_a_block_in_fp8():
    job = parse_job(
        VERIFY,
        [ROWWISE, "precision.fp8_end_blocks=9", "model.num_layers=24", "model.hidden_size=64"],
    ).job()
    small = shrink_job(job, steps=2, max_params=20_000, max_ranks=2, is_data_there=True).job
    assert small.precision.fp8 == "rowwise" and 2 * small.precision.fp8_end_blocks < 8
    assert make_plan(small)


def test_planner_prices_products_and_copies():
    h100, a100 = accelerator("h100"), accelerator("a100")
    plans = {
        fp8: make_test_plan(*LARGE, f"precision.fp8={fp8}")
        for fp8 in ("none", "rowwise", "tensorwise")
    }
    seconds = {fp8: step_time(plan, h100).compute_s for fp8, plan in plans.items()}
    assert seconds["none"] > seconds["rowwise"] > seconds["tensorwise"]
    assert step_time(plans["rowwise"], a100).compute_s == step_time(plans["none"], a100).compute_s
    wide = make_test_plan(*LARGE, ROWWISE, "precision.fp8_end_blocks=3")
    gained = [seconds["none"] - step_time(p, h100).compute_s for p in (plans["rowwise"], wide)]
    assert gained[1] == pytest.approx(gained[0] * 2 / 6)  # blocks in fp8: 6 of 8, then 2

    state = {
        fp8: rank_state(plan.job, plan.stages, plan.grid, tp_rank=0) for fp8, plan in plans.items()
    }
    matrices = 4096 * (4096 * 2 + 1024 * 2 + 3 * 14336)
    assert state["rowwise"].weight_bytes - state["none"].weight_bytes == 2 * 6 * matrices
