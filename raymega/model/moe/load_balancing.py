"""Losses that keep the load of experts even, what a step's routing was like, and the loss-free bias.

Losses come into backward as gradients and never into the reported loss. They are sums over tokens, as
the loss of the model is, because only a step divides. Each rank has its own tokens' terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from raymega.config.moe import MoeSection
from raymega.parallel.comm.collectives import all_reduce
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core.linear_map import with_gradient
from raymega.parallel.expert_parallel.token_ids import TokenIds

NUM_SUMS = 5
"""Of a :class:`Record`'s sums, those that are not by expert."""


@dataclass(kw_only=True, slots=True)
class LoadStats:
    """What is told of one micro-batch's routing on this rank besides its scores and choices.

    Attributes:
        token_ids: Of the tokens.
        gaps: [T], by how much the last choice was better than the next, or kept before another by its
            weight.
        kept: Choices of counted tokens that were not dropped, a scalar; None where none can be.
        losses: The router's, by their names in :class:`Load`, scalars; autograd does not see them.
    """

    token_ids: TokenIds
    gaps: Tensor
    kept: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A step's routing of all ranks in one layer, or of one rank.

    Attributes:
        counts: [E], choices of counted tokens by expert.
        tokens: Counted tokens.
        kept: Choices that were not dropped.
        entropy: Sum over tokens, in nats.
        balance: Sum of balancing losses.
        z: Sum of z-losses.
    """

    counts: Tensor
    tokens: float
    kept: float
    entropy: float
    balance: float
    z: float

    @staticmethod
    def of(sums: Tensor) -> Load:
        """From those of :meth:`Record.take` that were added up."""
        counts, rest = sums[:-NUM_SUMS], sums[-NUM_SUMS:].tolist()
        return Load(
            counts=counts, tokens=rest[0], kept=rest[1], entropy=rest[2], balance=rest[3], z=rest[4]
        )


class Record:
    """Adds up what the routing of a step was like: counts, tokens, kept, entropy, balance, z.

    A micro-batch is added when its backward passes: once, however often forward ran. Who ends a step
    takes the sums.

    Attributes:
        name: The router's.
        loss_gradient: What backward of a step starts from, which the losses here must too: 1 but for
            float16's scale.
    """

    def __init__(self, name: str, num_experts: int) -> None:
        self.name, self.num_experts = name, num_experts
        self.loss_gradient = 1.0
        self._sums: Tensor | None = None
        self._parts: dict[str, Tensor] = {}
        self._margin: Tensor | None = None

    def start(self, *, loss_gradient: float) -> None:
        """A step's passes begin; what was added and never taken belongs to none."""
        self.loss_gradient = loss_gradient
        self._sums = self._margin = None

    def add(self, load_stats: LoadStats, shares: Tensor, chosen: Tensor) -> None:
        """One micro-batch, in its backward: shares [T, E] that add up to 1, choices [T, k] before any is dropped."""
        if self._sums is None:
            self._begin(chosen.device)
        token_ids, parts, top_k = load_stats.token_ids, self._parts, chosen.shape[1]
        add_load(chosen, token_ids, parts["counts"])
        parts["tokens"].add_(token_ids.num_counted)
        if load_stats.kept is None:
            parts["kept"].add_(token_ids.num_counted, alpha=top_k)
        else:
            parts["kept"].add_(load_stats.kept)
        parts["entropy"].add_(entropy(shares, token_ids))
        for name, loss in load_stats.losses.items():
            parts[name].add_(loss)
        if load_stats.gaps.numel():
            margin = torch.where(token_ids.is_counted, load_stats.gaps, torch.inf).min()
            self._margin = margin if self._margin is None else torch.minimum(self._margin, margin)

    def drain(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Sums [E + 5] and the least margin since the last call, in float64; forgets both."""
        if self._sums is None:
            self._begin(device)
        sums, margin = self._sums, self._margin
        assert sums is not None, "begun"
        self._sums = self._margin = None
        if margin is None:
            margin = torch.tensor(torch.inf, device=device)
        return sums, margin.to(torch.float64)

    def _begin(self, device: torch.device) -> None:
        sums = torch.zeros(self.num_experts + NUM_SUMS, dtype=torch.float64, device=device)
        sizes, names = [self.num_experts, *[1] * NUM_SUMS], [part.name for part in fields(Load)]
        self._sums, self._parts = sums, dict(zip(names, sums.split(sizes), strict=True))


def join(x: Tensor, loss: Tensor, record: Record) -> Tensor:
    """``x`` as it is; its backward lets ``loss`` in, a scalar, with the record's gradient."""
    dtype = loss.dtype
    return with_gradient(x, loss, lambda grad: grad.new_tensor(record.loss_gradient, dtype=dtype))


def shares_of(scores: Tensor, moe: MoeSection) -> Tensor:
    """Scores [T, E] that add up to 1."""
    return (
        scores if moe.router_score_function == "softmax" else scores / scores.sum(-1, keepdim=True)
    )


def add_load(chosen: Tensor, token_ids: TokenIds, counts: Tensor) -> Tensor:
    """Add to ``counts`` [E] float64, and return, how many choices of counted tokens each expert is."""
    return counts.scatter_add_(0, chosen.flatten(), token_ids.counted_choices(chosen.shape[1]))


def auxiliary_loss(  # noqa: PLR0913  # what one formula reads
    moe: MoeSection,
    scores: Tensor,
    chosen: Tensor,
    token_ids: TokenIds,
    *,
    totals: Tensor | None,
    last: Tensor | None,
    micro: Group,
) -> Tensor | None:
    """coefficient * E * sum over experts of load share * mean score, once for each counted token.

    Switch Transformer's loss (Fedus et al. 2021, eq. 4) for k choices. The load share is that of the
    micro-batch, of the token's row (DeepSeek-V2), or of the last step (0 in the first).

    Args:
        moe: Which of them, and how much.
        scores: [T, E].
        chosen: [T, k] int64.
        token_ids: Of the tokens.
        totals: [E + 1], load and tokens of the micro-batch.
        last: [E], load of the last step.
        micro: The ranks that share the micro-batch.

    Returns:
        This rank's terms of the sum, a scalar; None for a job without.
    """
    if not moe.has_aux_loss:
        return None
    load = _load(moe, chosen, token_ids, totals=totals, last=last, micro=micro)
    share = load / load.sum(-1, keepdim=True).clamp(min=1)
    per_token = (shares_of(scores, moe) * share.to(scores.dtype)).sum(-1)
    return moe.router_aux_loss_coef * moe.num_experts * (per_token * token_ids.is_counted).sum()


def z_loss(moe: MoeSection, logits: Tensor, token_ids: TokenIds) -> Tensor | None:
    """coefficient * logsumexp(logits)^2 of each counted token (ST-MoE, Zoph et al. 2022, eq. 5)."""
    if not moe.router_z_loss_coef:
        return None
    return moe.router_z_loss_coef * (logits.logsumexp(-1).square() * token_ids.is_counted).sum()


def entropy(shares: Tensor, token_ids: TokenIds) -> Tensor:
    """Sum over counted tokens of the entropy of their scores, in nats."""
    return torch.special.entr(shares).sum(-1, dtype=torch.float64) @ token_ids.counted


@torch.no_grad()
def update_expert_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """One step of loss-free balancing (Wang et al. 2024; DeepSeek-V3): by the sign of the error."""
    # Whole numbers, so that an expert at the mean is not moved by a division's rounding.
    bias += rate * torch.sign(counts.sum() - counts.shape[0] * counts).to(bias.dtype)


@torch.no_grad()
def _load(
    moe: MoeSection,
    chosen: Tensor,
    token_ids: TokenIds,
    *,
    totals: Tensor | None,
    last: Tensor | None,
    micro: Group,
) -> Tensor:
    """[E], or [T, E] where each token's row has its own."""
    if moe.load_balancing_type == "global":
        assert last is not None, "a job that balances by the last step keeps its counts"
        return last.detach().to(torch.float64)
    if moe.load_balancing_type == "micro_batch":
        assert totals is not None, "the router adds them up"
        return totals[:-1]
    num_rows = _num_rows(token_ids, micro)
    table = torch.zeros(num_rows * moe.num_experts, dtype=torch.float64, device=chosen.device)
    token_layout = token_ids.rows[:, None] * moe.num_experts + chosen
    table.scatter_add_(0, token_layout.flatten(), token_ids.counted_choices(chosen.shape[1]))
    return all_reduce(table, micro).view(num_rows, moe.num_experts)[token_ids.rows]


def _num_rows(token_ids: TokenIds, micro: Group) -> int:
    return token_ids.numbers.shape[0] * micro.size // token_ids.row_length
