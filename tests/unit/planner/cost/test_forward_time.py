"""What a reference or a teacher costs a step: seconds, FLOPs, and bytes of a rank."""

import pytest
import torch

from raymega.plan.flops import flops_per_token, forward_flops_per_token, job_flops_per_token
from raymega.plan.hardware.catalog import CATALOGUE
from raymega.planner.cost.peak_memory import memory_use
from raymega.planner.cost.step_time import step_time
from raymega.planner.cost.teacher_memory import teacher_memory
from raymega.train.build import build_parts
from tests.support.jobs import layout_overrides, make_test_plan
from tests.support.params import ALONE

H100 = CATALOGUE["h100"]
PAIRS = ("data.packing=best_fit", "data.seq_len=64", "model.lora.r=2")
SAME = ("distillation.loss_type=forward_kl",)
TEACHER = (
    "distillation.loss_type=forward_kl", "distillation.teacher_model={family: llama, num_layers: 6, hidden_size: 64, "
    "num_heads: 8, ffn_hidden_size: 128, vocab_size: 256, max_positions: 64}",
)  # fmt: skip


def _plan(*options, layout="tp2-pp2"):
    return make_test_plan(*layout_overrides(layout), *options)


def _reference(*options):
    return step_time(_plan(*options), H100).reference_s


def test_a_step_has_the_forward_passes_of_its_reference():
    base = _reference(*PAIRS, "preference.loss_type=sigmoid")
    assert base > 0
    assert _reference(*PAIRS, "preference.loss_type=kto") == 2 * base
    assert _reference(*PAIRS, "preference.loss_type=kto", "preference.reference=stored") == base
    for none in ((), (*PAIRS, "preference.loss_type=orpo"), (*SAME, "distillation.teacher=stored")):
        assert _reference(*none) == 0
        assert "reference" not in step_time(_plan(*none), H100).parts
    # a teacher of the model's own size costs what a base costs; a larger one more
    same = _reference(*SAME)
    assert same == pytest.approx(step_time(_plan(), H100).pipeline_s / 3, rel=0.35)
    assert _reference(*TEACHER) > 1.3 * same
    step = step_time(_plan(*SAME), H100)
    assert step.total_s - step_time(_plan(), H100).total_s == pytest.approx(same, rel=1e-9)


def test_model_flops_have_the_forward_passes_too():
    own = _plan().job.model
    trained = flops_per_token(own, seq_len=32)
    assert job_flops_per_token(_plan().job, seq_len=32) == trained
    assert job_flops_per_token(_plan(*SAME).job, seq_len=32) == pytest.approx(trained * 4 / 3)
    teacher = flops_per_token(_plan(*TEACHER).job.distillation.teacher_model, seq_len=32) / 3
    assert job_flops_per_token(_plan(*TEACHER).job, seq_len=32) == pytest.approx(trained + teacher)
    pairs = _plan(*PAIRS, "preference.loss_type=kto")
    trained = flops_per_token(pairs.job.model, seq_len=32)
    two = 2 * forward_flops_per_token(pairs.job.model, seq_len=32)
    assert job_flops_per_token(pairs.job, seq_len=32) == pytest.approx(trained + two)


def test_a_teacher_takes_what_its_weights_take():
    plan = _plan(*TEACHER, layout="tp1")
    parts = build_parts(plan, rank=0, groups=ALONE, device=torch.device("cpu"))
    held = sum(part.values.nbytes for part in parts.teacher.weights.frozen)
    found = teacher_memory(plan, 0)
    rope = 2 * 64 * 4 * 8  # cosines and sines of 64 positions, four pairs a head
    assert found.state_bytes == pytest.approx(held + rope, rel=1e-3)
    with_it, without = memory_use(plan), memory_use(_plan(layout="tp1"))
    assert with_it.state_bytes - without.state_bytes == found.state_bytes
    assert with_it.activation_bytes - without.activation_bytes >= found.kept_bytes


def test_what_a_pass_leaves_is_on_the_last_stage_alone():
    plan = _plan(*TEACHER)
    first, last = (teacher_memory(plan, pp_rank) for pp_rank in range(2))
    assert first.kept_bytes == first.loss_bytes == 0
    streams = plan.batch.num_micro_batches * plan.batch.micro_batch_size * 32 * 64 * 8
    logits = plan.batch.micro_batch_size * 32 * 128 * 8
    assert last.kept_bytes == streams + logits
    # weights that are sharded are gathered for a use
    many, sharded = (
        teacher_memory(_plan(*TEACHER, f"parallel.sharding={level}", layout="dp4"), 0).state_bytes
        for level in ("optimizer", "parameters")
    )
    assert sharded < many
    stored = teacher_memory(_plan(*SAME, "distillation.teacher=stored"), 1)
    assert stored.state_bytes == 0 < stored.kept_bytes
