"""Fields that do nothing without another one are refused when a job sets them."""

import pytest

from raymega.config.load import parse_job
from raymega.errors import PlanError
from raymega.plan.run_plan import job_values, make_plan
from raymega.plan.validation.unused_fields import PARTNERS, default_of, settled, unused_values
from tests.support.jobs import VERIFY

UNREAD = {
    "run.eval_ema": ("true", ["optimizer.ema_decay=0.9"]),
    "run.eval_tasks_grid": ("tp=2", ["run.eval_tasks_on=beside"]),
    "data.packing_window": (64, ["data.packing=best_fit"]),
    "elastic.snapshot_timeout_s": (5.0, ["elastic.snapshot_every=1"]),
    "elastic.snapshot_during_save": ("pause", ["elastic.snapshot_every=1"]),
    "elastic.snapshot_backpressure": ("skip", ["elastic.snapshot_every=1"]),
    "elastic.on_replica_loss": ("continue", ["parallel.dp=4"]),
    "memory.recompute_every": (2, ["memory.recompute=full"]),
    "memory.recompute_parts": ("[norm]", ["memory.recompute=selective"]),
    "distillation.weight": (0.3, ["distillation.loss_type=forward_kl"]),
    "distillation.temperature": (2.0, ["distillation.loss_type=forward_kl"]),
    "distillation.teacher": ("stored", ["distillation.loss_type=forward_kl"]),
    "distillation.teacher_checkpoint": ("runs/large", ["distillation.loss_type=forward_kl"]),
    "distillation.top_k": (8, ["distillation.loss_type=forward_kl", "distillation.teacher=stored"]),
    "model.label_smoothing": (0.1, ["model.loss=cross_entropy"]),
    "model.z_loss": (0.1, ["model.loss=cross_entropy"]),
    "model.swiglu_alpha": (2.0, ["model.family=gpt_oss"]),
    "model.swiglu_limit": (3.0, ["model.family=gpt_oss"]),
    "model.rope_truncate": ("false", ["model.rope_scaling=yarn"]),
    "model.mtp_loss_scaling_factor": (0.1, ["model.num_nextn_predict_layers=1"]),
    "model.rope_theta": (5e5, ["model.family=llama"]),
    "model.rope_factor": (4.0, ["model.rope_scaling=llama3"]),
    "model.rope_high_freq_factor": (5.0, ["model.rope_scaling=llama3"]),
    "model.rope_low_freq_factor": (2.0, ["model.rope_scaling=llama3"]),
    "model.rope_beta_fast": (16.0, ["model.rope_scaling=yarn"]),
    "model.rope_beta_slow": (2.0, ["model.rope_scaling=yarn"]),
    "model.rope_mscale": (0.5, ["model.rope_scaling=yarn"]),
    "model.rope_original_positions": (64, ["model.rope_scaling=llama3"]),
    "run.sample_prompts": ("[a]", ["run.samples_every=2", "run.sample_tokens=8"]),
    "run.sample_images": (
        "[a.png]",
        ["run.samples_every=2", "run.sample_prompts=[a]", "run.sample_tokens=8"],
    ),
    "run.sample_temperature": (
        0.5,
        ["run.samples_every=2", "run.sample_prompts=[a]", "run.sample_tokens=8"],
    ),
    "run.sample_tokens": (8, ["run.samples_every=2", "run.sample_prompts=[a]"]),
    "optimizer.beta1": (0.8, ["optimizer.name=adamw"]),
    "optimizer.beta2": (0.8, ["optimizer.name=adamw"]),
    "optimizer.eps": (1e-6, ["optimizer.name=adamw"]),
    "optimizer.head_lr": (1e-3, ["model.tie_word_embeddings=false"]),
    "optimizer.momentum": (0.5, ["optimizer.name=sgd"]),
    "optimizer.newton_schulz_steps": (4, ["optimizer.name=muon"]),
    "parallel.hierarchical_cp_size": (4, ["parallel.cp=8", "parallel.cp_method=hybrid"]),
    "parallel.cp_method": ("all_gather", ["parallel.cp=2"]),
    "parallel.moe_token_dispatcher_type": (
        "all_gather",
        ["model.moe.num_experts=4", "parallel.tp=2", "parallel.ep=2"],
    ),
    "parallel.overlap_moe_expert_parallel_comm": (
        "true",
        ["model.moe.num_experts=4", "parallel.tp=2", "parallel.ep=2"],
    ),
    "parallel.balance_images": (
        "true",
        [
            "model.vision={kind: clip, image_size: 8, patch_size: 4, num_layers: 2, hidden_size: 8, num_heads: 2, "
            "ffn_hidden_size: 8, image_token_id: 99}",
            "parallel.dp=2",
        ],
    ),
    "parallel.tp_comm_overlap": ("true", ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "precision.fp8_end_blocks": (0, ["precision.fp8=rowwise"]),
    "precision.loss_scale": (1024.0, ["precision.dtype=float16"]),
    "precision.loss_scale_hysteresis": (3, ["precision.dtype=float16"]),
    "precision.loss_scale_window": (10, ["precision.dtype=float16"]),
    "precision.min_loss_scale": (2.0, ["precision.dtype=float16"]),
}
OTHER_LOSS = ["plugins.modules=[tests.golden.other_loss]", "model.loss=golden.margin"]
ALONE = {
    "elastic.on_replica_loss": ["parallel.dp=4", "parallel.sharding=optimizer"],
    "model.label_smoothing": OTHER_LOSS,
    "model.z_loss": OTHER_LOSS,
    "model.rope_theta": ["model.family=gpt2"],
    **{
        key: ["optimizer.name=sgd"]
        for key in ("optimizer.beta1", "optimizer.beta2", "optimizer.eps")
    },
}
SHARDED = ["parallel.dp=4", "parallel.sharding=optimizer"]
PLAIN = (
    "parallel.pp=1",
    "model.family=llama",
    "data.seq_len=32",
    "model.num_heads=8",
    "model.hidden_size=64",
)


@pytest.mark.parametrize("path", PARTNERS)
def test_field_is_refused_alone_and_taken_with_its_partner(path):
    value, partner = UNREAD[path]
    alone = ALONE.get(path, [])
    with pytest.raises(PlanError, match="it has no effect without") as refused:
        make_plan(_job(*PLAIN, *alone, f"{path}={value}"))
    (fault,) = refused.value.faults
    assert fault.fact.startswith(f"{path}=") and "remove it" in fault.remedy
    assert make_plan(_job(*PLAIN, *partner, f"{path}={value}"))
    assert make_plan(_job(*PLAIN, *alone, f"{path}={_text(default_of(path))}"))


@pytest.mark.parametrize(
    ("layout", "is_legal"),
    [
        (["parallel.dp=2", "parallel.cp=2"], True),
        (["parallel.dp=1"], True),
        ([*SHARDED, "parallel.data_parallel_shard_degree=2"], True),
        ([*SHARDED, "parallel.data_parallel_shard_degree=2", "parallel.cp=2"], False),
        (["parallel.dp=4", "parallel.sharding=parameters"], False),
        (["parallel.dp=4", "memory.offload=[optimizer]"], False),
        (["parallel.dp=2", "parallel.ep=2", "model.moe.num_experts=4"], False),
    ],
)
def test_continuing_without_a_replica_is_refused_where_none_can_hold_the_state(layout, is_legal):
    job = _job(*PLAIN, *layout, "elastic.on_replica_loss=continue")
    if is_legal:
        assert make_plan(job) and settled(job) is job
        return
    with pytest.raises(PlanError, match=r"elastic\.on_replica_loss=continue with parallel\.ep="):
        make_plan(job)
    # layouts that a search or a fallback draws go back to the checkpoint instead
    assert make_plan(settled(job)).job.elastic.on_replica_loss == "restart"


def test_every_row_names_fields_that_exist():
    paths = {path for path, partner in PARTNERS.items() for path in (path, *partner.reads)}
    assert paths <= job_values(_job()).keys() and set(UNREAD) == set(PARTNERS)


def test_defaults_of_what_is_not_read_make_the_job_legal_at_once():
    job = _job("parallel.pp=1", "parallel.cp=1")
    asked = {"cp_method": "hybrid", "hierarchical_cp_size": 4}
    broken = job.model_copy(update={"parallel": job.parallel.model_copy(update=asked)})
    assert unused_values(job_values(broken)) == {
        "parallel.cp_method": "ring",
        "parallel.hierarchical_cp_size": 2,
    }
    assert settled(broken) == job and settled(job) is job and make_plan(settled(broken))


def _text(value):
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else value


def _job(*overrides):
    return parse_job(VERIFY, [str(each) for each in overrides]).job()
