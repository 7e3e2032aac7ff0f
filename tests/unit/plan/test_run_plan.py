"""The plan: crosses as JSON without loss, refuses what the rules refuse."""

import re
from pathlib import Path

import pytest

from raymega.config.load import parse_job
from raymega.errors import PlanError
from raymega.plan.run_plan import make_plan, read_plan

VERIFY = Path(__file__).parents[3] / "jobs" / "verify.yaml"


def test_plan_survives_json():
    plan = make_plan(parse_job(VERIFY, ["parallel.tp=2", "parallel.dp=2"]).job())
    assert read_plan(plan.to_json()) == plan
    assert plan.grid.world_size == 8


def test_plan_names_the_stage_of_each_rank():
    plan = make_plan(parse_job(VERIFY, ["parallel.tp=2"]).job())
    assert [[s.index for s in plan.stages_of(rank)] for rank in range(4)] == [[0], [0], [1], [1]]


def test_plan_names_every_chunk_of_each_rank():
    plan = make_plan(parse_job(VERIFY, ["schedule.chunks=2", "schedule.name=interleaved"]).job())
    assert [[s.index for s in plan.stages_of(rank)] for rank in range(2)] == [[0, 2], [1, 3]]
    assert plan.sizes(plan.batch).microbatch_group_size_per_vp_stage == 2


def test_plan_refuses_all_broken_rules_at_once():
    job = parse_job(
        VERIFY, ["parallel.pp=8", "data.seq_len=999", "optimizer.lr_decay_steps=5"]
    ).job()
    with pytest.raises(PlanError) as caught:
        make_plan(job)
    text = str(caught.value)
    assert "parallel.pp=8" in text and "data.seq_len=999" in text and "lr_warmup_steps=5" in text


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("model.num_kv_heads=3", "model.num_kv_heads=3"),
        ("model.hidden_size=36", "model.hidden_size=36"),
        ("model.hidden_size=24", "model.hidden_size / model.num_heads = 3"),
        ("model.head_dim=5", "model.head_dim=5"),
        ("schedule.name=interleaved", "schedule.chunks=1"),
        (
            "schedule.chunks=2 schedule.microbatch_group_size_per_vp_stage=1",
            "schedule.microbatch_group_size_per_vp_stage=1",
        ),
        (
            "schedule.microbatch_group_size_per_vp_stage=4",
            "only 1f1b from 2 chunks on or interleaved reads it",
        ),
        (
            "schedule.max_in_flight_microbatches=4",
            "only zb_auto reads it; this is 1f1b, schedule.chunks=1",
        ),
        ("parallel.stages=auto parallel.is_loss_a_layer=true", "parallel.is_loss_a_layer=true"),
        ("model.make_vocab_size_divisible_by=257", "parallel.tp=2"),
    ],
)
def test_each_rule_names_its_fact(override, fact):
    with pytest.raises(PlanError, match=re.escape(fact)):
        make_plan(parse_job(VERIFY, [*override.split(), "parallel.tp=2"]).job())


@pytest.mark.parametrize(
    ("tp", "kv_heads", "is_legal"), [(4, 2, True), (8, 1, True), (2, 8, True), (4, 6, False)]
)
def test_ranks_hold_whole_key_and_value_heads_or_share_one(tp, kv_heads, is_legal):
    heads = {6: 12}.get(kv_heads, 8)
    job = parse_job(
        VERIFY, [
            f"parallel.tp={tp}", f"model.num_kv_heads={kv_heads}", f"model.num_heads={heads}",
            f"model.hidden_size={4 * heads}",
        ],
    ).job()  # fmt: skip
    if is_legal:
        assert make_plan(job).grid.tp == tp
        return
    with pytest.raises(PlanError, match="or be a multiple of it"):
        make_plan(job)


def test_tp_must_divide_the_positions_that_it_cuts():
    job = parse_job(VERIFY, ["parallel.tp=4", "data.seq_len=30"]).job()
    assert make_plan(job)
    job = parse_job(
        VERIFY, ["parallel.tp=4", "data.seq_len=30", "parallel.sequence_parallel=true"]
    ).job()
    with pytest.raises(PlanError, match=r"data.seq_len=30 \(remainder 2\).*data.seq_len=28"):
        make_plan(job)


def test_run_shorter_than_its_warmup_is_legal():
    assert make_plan(parse_job(VERIFY, ["run.steps=2"]).job()).job.run.steps == 2


@pytest.mark.parametrize(
    ("overrides", "fact"),
    [
        (["model.family=gpt2"], "model.rope_scaling=llama3; model.family=gpt2 has learned"),
        (["model.rope_low_freq_factor=4.0"], "model.rope_low_freq_factor=4; it must be less than"),
    ],
)
def test_rope_scaling_rules(overrides, fact):
    with pytest.raises(PlanError, match=re.escape(fact)):
        make_plan(parse_job(VERIFY, ["model.rope_scaling=llama3", *overrides]).job())


def test_head_features_free_the_head_from_the_width():
    job = parse_job(VERIFY, ["model.head_dim=10", "model.hidden_size=36"]).job()
    assert make_plan(job).job.model.head_width == 10
