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
DROPOUT = ("model.residual_dropout=0.1",)
TWO_KV_HEADS = ("model.num_kv_heads=2",)
EXPERTS = ("model.moe.num_experts=4", "model.moe.width=16")
BALANCED = (
    *EXPERTS, "model.moe.balance=micro_batch", "model.moe.balance_coefficient=0.1",
    "model.moe.capacity_factor=1.0",
)  # fmt: skip
BIASED = (*EXPERTS, "model.moe.score=sigmoid", "model.moe.has_bias=true", "model.moe.bias_rate=0.1")
LAST_LOAD = (*EXPERTS, "model.moe.balance=global", "model.moe.balance_coefficient=0.5")
DROPPED = (*EXPERTS, "model.moe.capacity_factor=0.5", "model.moe.drop_by=position")
LOSSES = ("model.vocab_size=70", "model.label_smoothing=0.1", "model.z_loss=1e-2")
LION = ("optimizer.name=lion", "optimizer.lr=1e-3")
EIGHT_BITS = ("optimizer.state_dtype=8bit",)
MUON = ("optimizer.name=muon", "model.num_kv_heads=2")
LATENT = (
    "model.num_kv_heads=num_heads", "model.is_embedding_tied=false", "model.mtp_depth=1",
    "model.mla={kv_rank: 8, q_rank: 6, nope_features: 4, rope_features: 2, value_features: 3}",
)  # fmt: skip
