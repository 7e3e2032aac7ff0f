"""Mutation: one planted mistake, and the jobs that several of them need."""

from __future__ import annotations

from dataclasses import dataclass, field

from raymega.verify.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A mistake and the layout that shows it.

    Attributes:
        name: What is wrong.
        file: Path in the package.
        old: Text that stands in the file exactly once.
        new: What takes its place.
        layout: On which the run becomes another one.
        job: Overrides of jobs/verify.yaml that the mistake needs.
    """

    name: str
    file: str
    old: str
    new: str
    layout: Layout
    job: tuple[str, ...] = field(default=())


GPT2 = ("model.family=gpt2", "model.num_kv_heads=num_heads")
PACKED = ("data.packing=best_fit", "data.packing_window=64", "data.document_multiple=4")
BLENDED = (
    "data.path=none", "data.sources=[{path: synthetic:a, weight: 0.6}, {path: synthetic:b, weight: 0.4}]",
    "data.stages=[{from_tokens: 160, sources: [{path: synthetic:b, weight: 0.7}, {path: synthetic:a}]}]",
)  # fmt: skip
DROPOUT = ("model.hidden_dropout=0.1",)
TWO_KV_HEADS = ("model.num_kv_heads=2",)
EXPERTS = ("model.moe.num_experts=4", "model.moe.intermediate_size=16")
BALANCED = (
    *EXPERTS, "model.moe.load_balancing_type=micro_batch", "model.moe.router_aux_loss_coef=0.1",
    "model.moe.capacity_factor=1.0",
)  # fmt: skip
BIASED = (
    *EXPERTS,
    "model.moe.router_score_function=sigmoid",
    "model.moe.expert_bias=true",
    "model.moe.expert_bias_update_rate=0.1",
)
LAST_LOAD = (*EXPERTS, "model.moe.load_balancing_type=global", "model.moe.router_aux_loss_coef=0.5")
DROPPED = (*EXPERTS, "model.moe.capacity_factor=0.5", "model.moe.token_drop_policy=position")
TASKS = ("run.eval_tasks=[{task: perplexity, path: drawn}]",)
LOSSES = ("model.vocab_size=70", "model.label_smoothing=0.1", "model.z_loss=1e-2")
FOCAL = (
    "plugins.modules=[tests.support.focal_parts]",
    "model.loss=tests.focal",
    "model.vocab_size=70",
)
LION = ("optimizer.name=lion", "optimizer.lr=1e-3")
EIGHT_BITS = ("optimizer.state_dtype=8bit",)
MUON = ("optimizer.name=muon", "model.num_kv_heads=2")
LATENT = (
    "model.num_kv_heads=num_heads", "model.tie_word_embeddings=false", "model.num_nextn_predict_layers=1",
    "model.mla={kv_lora_rank: 8, q_lora_rank: 6, qk_nope_head_dim: 4, qk_rope_head_dim: 2, v_head_dim: 3}",
)  # fmt: skip
