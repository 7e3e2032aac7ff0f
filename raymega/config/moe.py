"""The part of the model section that says which blocks hold experts, and how tokens reach them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import Decay, NonNegative, Positive, PositiveFloat, Section

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AUX_LEVELS = ("micro_batch", "sequence", "global")
"""Values of ``load_balancing_type`` that add an auxiliary loss."""


class MoeSection(Section):
    """Mixture of experts: the feed-forward layers of some blocks are chosen token by token."""

    num_experts: NonNegative = Field(
        default=0, description="E, experts of a block; 0 is a dense model."
    )
    top_k: Positive = Field(default=2, description="Experts that work on one token.")
    intermediate_size: Positive | Literal["ffn_hidden_size"] = Field(
        default="ffn_hidden_size", description="F, features inside one expert."
    )
    layer_freq: Positive = Field(
        default=1,
        description="After the dense blocks at the front, every so many-th block holds experts: 2 is "
        "the second, fourth, ... of them.",
    )
    first_k_dense_replace: NonNegative = Field(
        default=0, description="So many blocks at the front hold no experts."
    )
    shared_expert_intermediate_size: NonNegative = Field(
        default=0, description="F of the shared expert that sees every token; 0 is none."
    )
    shared_expert_gate: bool = Field(
        default=False,
        description="The shared expert's output is weighed by sigmoid of a learned linear of the "
        "token.",
    )
    router_score_function: Literal["softmax", "sigmoid"] = Field(
        default="softmax",
        description="From the router's logits to the scores of a token's experts.",
    )
    norm_topk_prob: bool = Field(
        default=True,
        description="The chosen scores are divided by their sum. With softmax that is a softmax over "
        "the chosen logits alone; false is a softmax over all of them, before the choice.",
    )
    routed_scaling_factor: PositiveFloat = Field(
        default=1.0, description="Times the chosen scores, after they are normalised."
    )
    n_group: Positive = Field(
        default=1,
        description="Groups of neighbouring experts, of which each token first chooses topk_group; "
        "bounds the ranks that a token is sent to. 1 is no limit.",
    )
    topk_group: Positive = Field(
        default=1, description="Groups that a token's experts may come from."
    )
    group_score: Literal["max", "top2"] = Field(
        default="max",
        description="A group's score: that of its best expert, or the sum of its two best.",
    )
    router_jitter_noise: Decay = Field(
        default=0.0,
        description="Training: each feature that the router reads is times a random number in "
        "[1 - jitter, 1 + jitter].",
    )
    router_dtype: Literal["float32", "float64"] = Field(
        default="float32",
        description="Least number format of logits and scores; that of compute where it is wider.",
    )
    load_balancing_type: Literal["none", "micro_batch", "sequence", "global", "sinkhorn"] = Field(
        default="none",
        description="What keeps the load even. A loss by the load of the micro-batch, of each of its "
        "rows, or of the whole last step; or sinkhorn: training chooses by scores that are evened out "
        "over the micro-batch.",
    )
    router_aux_loss_coef: Coefficient = Field(
        default=0.0, description="Weight of the balancing loss in each token's loss."
    )
    sinkhorn_rounds: Positive = Field(
        default=8,
        description="load_balancing_type=sinkhorn: times that rows and columns are evened out.",
    )
    expert_bias: bool = Field(
        default=False,
        description="Each expert has a bias that is added to its score for the choice only, as "
        "DeepSeek-V3 balances without a loss.",
    )
    expert_bias_update_rate: Coefficient = Field(
        default=0.0,
        description="expert_bias: what a step adds to the bias of an expert with less than the mean "
        "load, and takes from one with more; 0 leaves it as it is.",
    )
    router_z_loss_coef: Coefficient = Field(
        default=0.0,
        description="Weight of log(sum of exp(router logits))^2 in each token's loss.",
    )
    capacity_factor: Coefficient = Field(
        default=0.0,
        description="An expert takes at most this times its even share of a micro-batch's tokens, and "
        "drops the rest; 0 drops none.",
    )
    token_drop_policy: Literal["probability", "position"] = Field(
        default="probability",
        description="capacity_factor: which tokens an expert keeps, those that weigh it most or the "
        "first of the micro-batch.",
    )
    pad_expert_input_to_capacity: bool = Field(
        default=False,
        description="Each expert computes as many rows as its capacity, filled up with zeros: shapes "
        "that are always the same, without a wait for the host.",
    )

    @property
    def goes_by_micro_batch(self) -> bool:
        """A run with micro-batches of another size is another run."""
        return self.capacity_factor > 0 or self.load_balancing_type in ("micro_batch", "sinkhorn")

    @property
    def has_aux_loss(self) -> bool:
        """A balancing loss is added."""
        return self.load_balancing_type in AUX_LEVELS and self.router_aux_loss_coef > 0

    def holds_experts(self, layer: int) -> bool:
        """Whether block ``layer`` has experts where a dense one has a feed-forward layer."""
        place = layer - self.first_k_dense_replace
        return self.num_experts > 0 and place >= 0 and (place + 1) % self.layer_freq == 0
