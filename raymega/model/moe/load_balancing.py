"""Load balancing of experts: auxiliary losses, the loss-free bias, and statistics of a step's routing.

Auxiliary losses add gradients in backward but not to the reported loss. Like the model's loss they are
sums over tokens, which only `train/step.py` divides. Each rank has its own tokens' terms.
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
"""Number of a :class:`Record`'s sums besides the counts by expert: see :class:`Load`."""


@dataclass(kw_only=True, slots=True)
class LoadStats:
    """Statistics of one micro-batch's routing on this rank, besides scores and choices.

    Attributes:
        token_ids: Identity of the tokens.
        gaps: Margins of the decisions, [T]: score of the last expert chosen less that of the next
            one, or of a choice kept less that of one dropped.
        kept: Number of counted tokens' choices that were not dropped, a scalar; None without capacity.
        losses: Losses of the router by their names in :class:`Load`, detached scalars.
    """

    token_ids: TokenIds
    gaps: Tensor
    kept: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Routing of one step in one layer, summed over all ranks or of one rank.

    Attributes:
        counts: Choices of counted tokens by expert, [E].
        tokens: Number of counted tokens.
        kept: Number of choices that were not dropped.
        entropy: Entropy of the scores in nats, summed over tokens.
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
        """Return the load of summed vectors [E + NUM_SUMS] of :meth:`Record.drain`, in host memory."""
        counts, rest = sums[:-NUM_SUMS], sums[-NUM_SUMS:].tolist()
        return Load(
            counts=counts, tokens=rest[0], kept=rest[1], entropy=rest[2], balance=rest[3], z=rest[4]
        )


class Record:
    """Accumulator of a step's routing: counts, tokens, kept, entropy, balance, z.

    A micro-batch is added in its backward, so only once even if forward was recomputed.

    Attributes:
        name: Name of the router.
        loss_gradient: Gradient that backward starts from, for auxiliary losses too; 1, or float16's
            loss scale.
    """

    def __init__(self, name: str, num_experts: int) -> None:
        self.name, self.num_experts = name, num_experts
        self.loss_gradient = 1.0
        self._sums: Tensor | None = None
        self._parts: dict[str, Tensor] = {}
        self._margin: Tensor | None = None

    def start(self, *, loss_gradient: float) -> None:
        """Begin a step's passes, and drop sums of a pass that was not used."""
        self.loss_gradient = loss_gradient
        self._sums = self._margin = None

    def add(self, load_stats: LoadStats, shares: Tensor, chosen: Tensor) -> None:
        """Add one micro-batch: normalised scores [T, E], and choices [T, k] before any is dropped."""
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
        # least margin, for tests that compare layouts: a near tie may fall either way
        if load_stats.gaps.numel():
            margin = torch.where(token_ids.is_counted, load_stats.gaps, torch.inf).min()
            self._margin = margin if self._margin is None else torch.minimum(self._margin, margin)

    def drain(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return and reset the sums [E + NUM_SUMS] and the least margin, both float64."""
        if self._sums is None:
            self._begin(device)
        sums, margin = self._sums, self._margin
        assert sums is not None, "begun"
        self._sums, self._margin, self._parts = None, None, {}
        if margin is None:
            margin = torch.full((), torch.inf, device=device)
        return sums, margin.to(torch.float64)

    def _begin(self, device: torch.device) -> None:
        sums = torch.zeros(self.num_experts + NUM_SUMS, dtype=torch.float64, device=device)
        sizes, names = [self.num_experts, *[1] * NUM_SUMS], [part.name for part in fields(Load)]
        self._sums, self._parts = sums, dict(zip(names, sums.split(sizes), strict=True))


def join(x: Tensor, loss: Tensor, record: Record) -> Tensor:
    """Return ``x`` unchanged; its backward also starts that of ``loss``, with the record's gradient."""
    dtype = loss.dtype
    return with_gradient(x, loss, lambda grad: grad.new_full((), record.loss_gradient, dtype=dtype))


def shares_of(scores: Tensor, moe: MoeSection) -> Tensor:
    """Return scores [T, E] normalised to a sum of 1 over the experts."""
    return (
        scores if moe.router_score_function == "softmax" else scores / scores.sum(-1, keepdim=True)
    )


def add_load(chosen: Tensor, token_ids: TokenIds, counts: Tensor) -> Tensor:
    """Add each expert's number of counted choices to ``counts`` [E] float64, and return it."""
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
    """Return coefficient * E * sum over experts of load share * score, summed over counted tokens.

    It is Switch Transformer's loss (Fedus et al. 2021, eq. 4) for k choices. The load share is that of
    the micro-batch, of the token's row (DeepSeek-V2), or of the last step (0 in the first).

    Args:
        moe: Section with the type and coefficient of the loss.
        scores: Router scores, [T, E].
        chosen: Chosen experts, [T, k] int64.
        token_ids: Identity of the tokens.
        totals: Load and number of tokens of the micro-batch, [E + 1].
        last: Load of the last step, [E].
        micro: Group of the ranks that share the micro-batch.

    Returns:
        This rank's part of the sum, a scalar; None for a job without this loss.
    """
    if not moe.has_aux_loss:
        return None
    load = _load(moe, chosen, token_ids, totals=totals, last=last, micro=micro)
    share = load / load.sum(-1, keepdim=True).clamp(min=1)
    per_token = (shares_of(scores, moe) * share.to(scores.dtype)).sum(-1)
    return moe.router_aux_loss_coef * moe.num_experts * (per_token * token_ids.is_counted).sum()


def z_loss(moe: MoeSection, logits: Tensor, token_ids: TokenIds) -> Tensor | None:
    """Return coefficient * logsumexp(logits)^2 over counted tokens (ST-MoE, Zoph et al. 2022, eq. 5)."""
    if not moe.router_z_loss_coef:
        return None
    return moe.router_z_loss_coef * (logits.logsumexp(-1).square() * token_ids.is_counted).sum()


def entropy(shares: Tensor, token_ids: TokenIds) -> Tensor:
    """Return the entropy of the scores in nats, summed over counted tokens."""
    return torch.special.entr(shares).sum(-1, dtype=torch.float64) @ token_ids.counted


@torch.no_grad()
def update_expert_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Move the bias by ``rate`` against the load's error (Wang et al. 2024; DeepSeek-V3)."""
    # Times E instead of a mean: whole numbers, so an expert at the mean has an error of exactly 0.
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
    """Return the load that the loss uses: [E], or [T, E] where it is that of each token's row."""
    if moe.load_balancing_type == "global":
        assert last is not None, "a job that balances by the last step keeps its counts"
        return last.detach().to(torch.float64)
    if moe.load_balancing_type == "micro_batch":
        assert totals is not None, "the router adds them up"
        return totals[:-1]
    # by row: count into [rows, E], sum over the ranks that share rows, look up by token
    num_rows = _num_rows(token_ids, micro)
    table = torch.zeros(num_rows * moe.num_experts, dtype=torch.float64, device=chosen.device)
    token_layout = token_ids.rows[:, None] * moe.num_experts + chosen
    table.scatter_add_(0, token_layout.flatten(), token_ids.counted_choices(chosen.shape[1]))
    return all_reduce(table, micro).view(num_rows, moe.num_experts)[token_ids.rows]


def _num_rows(token_ids: TokenIds, micro: Group) -> int:
    return token_ids.numbers.shape[0] * micro.size // token_ids.row_length
