"""The job file's model.moe section: blocks with experts, the router, and load balancing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raymega.config.fields import Decay, NonNegative, Positive, PositiveFloat, Section

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AUX_LEVELS = ("micro_batch", "sequence", "global")
"""Values of ``load_balancing_type`` that add an auxiliary loss."""


class MoeSection(Section):
    """Mixture of experts: in some blocks a router chooses feed-forward layers for each token."""

    # Sizes, and the blocks that have experts.
    num_experts: NonNegative = 0
    """E, experts of a block; 0 is a dense model."""
    top_k: Positive = 2
    """Number of experts that each token is sent to."""
    intermediate_size: Positive | Literal["ffn_hidden_size"] = "ffn_hidden_size"
    """F, features inside one expert."""
    layer_freq: Positive = 1
    """Interval of blocks with experts after the dense blocks at the front: with 2 the second,
    fourth, ... of them has experts."""
    first_k_dense_replace: NonNegative = 0
    """Number of dense blocks at the front, which have no experts."""
    shared_expert_intermediate_size: NonNegative = 0
    """F of the shared expert that sees every token; 0 is none."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a learned linear function of the token."""
    # Router: scores and the choice of experts.
    router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns a token's router logits into scores of the experts."""
    norm_topk_prob: bool = True
    """Divide the chosen scores by their sum. With softmax that equals a softmax over the chosen
    logits alone; false keeps the scores of the softmax over all logits."""
    routed_scaling_factor: PositiveFloat = 1.0
    """Factor on the chosen scores, after they are normalised."""
    apply_probs_on_input: bool = False
    """Multiply what an expert reads by its weight, instead of what it returns."""
    n_group: Positive = 1
    """Number of groups of neighbouring experts, of which each token first chooses topk_group; this
    bounds the ranks that a token is sent to. 1 is no limit."""
    topk_group: Positive = 1
    """Number of groups that a token's experts may come from."""
    group_score: Literal["max", "top2"] = "max"
    """Score of a group: that of its best expert, or the sum of its two best."""
    router_jitter_noise: Decay = 0.0
    """Training only: each feature that the router reads is multiplied by a random number in [1 -
    jitter, 1 + jitter]."""
    router_dtype: Literal["float32", "float64"] = "float32"
    """Narrowest number format of logits and scores; a wider compute format replaces it."""
    # Load balancing.
    load_balancing_type: Literal["none", "micro_batch", "sequence", "global", "sinkhorn"] = "none"
    """Method that evens out the load of experts: an auxiliary loss on the load of the micro-batch,
    of each sequence in it, or of the whole last step (global); or sinkhorn: in training, experts
    are chosen by scores that are balanced over the micro-batch."""
    router_aux_loss_coef: Coefficient = 0.0
    """Weight of the balancing loss in each token's loss."""
    sinkhorn_rounds: Positive = 8
    """load_balancing_type=sinkhorn: number of normalisations of rows and columns."""
    expert_bias: bool = False
    """Add a bias to each expert's score for the choice only: DeepSeek-V3's balancing without a
    loss."""
    expert_bias_update_rate: Coefficient = 0.0
    """expert_bias: amount that a step adds to the bias of an expert below the mean load, and
    subtracts from that of one above it; 0 keeps the biases."""
    router_z_loss_coef: Coefficient = 0.0
    """Weight of log(sum of exp(router logits))^2 in each token's loss."""
    # Capacity of an expert.
    capacity_factor: Coefficient = 0.0
    """Largest number of tokens that an expert takes of a micro-batch, over its even share; it drops
    the rest. 0 drops none."""
    token_drop_policy: Literal["probability", "position"] = "probability"
    """capacity_factor: tokens that a full expert keeps: those with the highest weight, or the first
    of the micro-batch."""
    pad_expert_input_to_capacity: bool = False
    """Pad each expert's input with zero rows to its capacity: shapes are then constant, and the GPU
    does not wait for the host."""

    @property
    def depends_on_micro_batch_size(self) -> bool:
        """Return whether the micro-batch size changes what the run computes."""
        return self.capacity_factor > 0 or self.load_balancing_type in ("micro_batch", "sinkhorn")

    @property
    def has_aux_loss(self) -> bool:
        """Return whether an auxiliary balancing loss is added."""
        return self.load_balancing_type in AUX_LEVELS and self.router_aux_loss_coef > 0

    def holds_experts(self, layer: int) -> bool:
        """Return whether block ``layer`` has experts instead of a dense feed-forward layer."""
        # Counted from the first block behind the dense ones at the front.
        place = layer - self.first_k_dense_replace
        return self.num_experts > 0 and place >= 0 and (place + 1) % self.layer_freq == 0
