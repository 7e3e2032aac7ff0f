"""Losses that keep the load of experts even, what a step's routing was like, and the loss-free bias.

Losses come into backward as gradients and never into the reported loss. They are sums over tokens, as
the loss of the model is, because only a step divides. Each rank has its own tokens' terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.config.moe import MoeSection
from raymega.parallel.comm import all_reduce
from raymega.parallel.groups import Group
from raymega.parallel.token_marks import TokenMarks

NUM_SUMS = 5
"""Of :meth:`Tally.sums`, those that are not by expert."""


class Tally(NamedTuple):
    """One micro-batch's routing of this rank's counted tokens: sums, and the least margin.

    ``counts`` [E] are choices by expert before any is dropped, ``kept`` those that were not.
    """

    counts: Tensor
    tokens: Tensor
    kept: Tensor
    entropy: Tensor
    balance: Tensor
    z: Tensor
    margin: Tensor

    def sums(self) -> Tensor:
        """[E + 5] in the order of the fields."""
        exact = torch.stack((self.tokens, self.kept))
        rest = torch.stack((self.entropy, self.balance, self.z)).to(torch.float64)
        return torch.cat((self.counts, exact, rest))


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
        """From :meth:`Tally.sums` that were added up."""
        counts, rest = sums[:-NUM_SUMS], sums[-NUM_SUMS:].tolist()
        return Load(
            counts=counts, tokens=rest[0], kept=rest[1], entropy=rest[2], balance=rest[3], z=rest[4]
        )


class Record:
    """Adds up the tallies of a step.

    A tally is added when its micro-batch's backward passes: once, however often forward ran. Who ends
    a step takes the sums.

    Attributes:
        name: The router's.
        loss_gradient: What backward of a step starts from, which the losses here must too: 1 but for
            float16's scale.
    """

    def __init__(self, name: str, num_experts: int) -> None:
        self.name, self.num_experts = name, num_experts
        self.loss_gradient = 1.0
        self._sums: Tensor | None = None
        self._margin: Tensor | None = None

    def add(self, tally: Tally) -> None:
        """Of one micro-batch."""
        sums = tally.sums()
        self._sums = sums if self._sums is None else self._sums + sums
        margin = tally.margin
        self._margin = margin if self._margin is None else torch.minimum(self._margin, margin)

    def take(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Sums [E + 5] and the least margin since the last call, in float64; forgets both."""
        sums, margin = self._sums, self._margin
        self._sums = self._margin = None
        if sums is None or margin is None:
            sums = torch.zeros(self.num_experts + NUM_SUMS, dtype=torch.float64, device=device)
            margin = torch.tensor(torch.inf, device=device)
        return sums, margin.to(torch.float64)


def join(x: Tensor, loss: Tensor, tally: Tally, record: Record) -> Tensor:
    """``x`` as it is; its backward lets ``loss`` in, a scalar, and gives ``tally`` to ``record``."""
    return _Join.apply(x, loss, tally, record)


@torch.no_grad()
def count_load(chosen: Tensor, marks: TokenMarks, num_experts: int) -> tuple[Tensor, Tensor]:
    """Choices of counted tokens by expert [E], and how many such tokens there are, in float64."""
    counted = marks.is_counted.to(torch.float64)
    counts = counted.new_zeros(num_experts)
    counts.scatter_add_(0, chosen.flatten(), counted[:, None].expand(chosen.shape).flatten())
    return counts, counted.sum()


def auxiliary_loss(  # noqa: PLR0913  # what one formula reads
    moe: MoeSection,
    shares: Tensor,
    chosen: Tensor,
    marks: TokenMarks,
    *,
    totals: Tensor | None,
    last: Tensor | None,
    micro: Group,
) -> Tensor:
    """coefficient * E * sum over experts of load share * mean score, once for each counted token.

    Switch Transformer's loss (Fedus et al. 2021, eq. 4) for k choices. The load share is that of the
    micro-batch, of the token's row (DeepSeek-V2), or of the last step (0 in the first).

    Args:
        moe: Which of them, and how much.
        shares: [T, E], scores that add up to 1.
        chosen: [T, k] int64.
        marks: Of the tokens.
        totals: [E + 1], load and tokens of the micro-batch.
        last: [E], load of the last step.
        micro: The ranks that share the micro-batch.

    Returns:
        This rank's terms of the sum: a scalar.
    """
    if not moe.has_aux_loss:
        return shares.new_zeros(())
    load = _load(moe, chosen, marks, totals=totals, last=last, micro=micro)
    share = load / load.sum(-1, keepdim=True).clamp(min=1)
    per_token = (shares * share.to(shares.dtype)).sum(-1)
    return moe.balance_coefficient * moe.num_experts * (per_token * marks.is_counted).sum()


def z_loss(moe: MoeSection, logits: Tensor, marks: TokenMarks) -> Tensor:
    """coefficient * logsumexp(logits)^2 of each counted token (ST-MoE, Zoph et al. 2022, eq. 5)."""
    if not moe.z_coefficient:
        return logits.new_zeros(())
    return moe.z_coefficient * (logits.logsumexp(-1).square() * marks.is_counted).sum()


@torch.no_grad()
def entropy(shares: Tensor, marks: TokenMarks) -> Tensor:
    """Sum over counted tokens of the entropy of their scores, in nats."""
    return (torch.special.entr(shares).sum(-1) * marks.is_counted).sum()


@torch.no_grad()
def nudge_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """One step of loss-free balancing (Wang et al. 2024; DeepSeek-V3): by the sign of the error."""
    bias += rate * torch.sign(counts.mean() - counts).to(bias.dtype)


@torch.no_grad()
def _load(
    moe: MoeSection,
    chosen: Tensor,
    marks: TokenMarks,
    *,
    totals: Tensor | None,
    last: Tensor | None,
    micro: Group,
) -> Tensor:
    """[E], or [T, E] where each token's row has its own."""
    if moe.balance == "global":
        assert last is not None, "a job that balances by the last step keeps its counts"
        return last.detach().to(torch.float64)
    if moe.balance == "micro_batch":
        assert totals is not None, "the router adds them up"
        return totals[:-1]
    num_rows = _num_rows(marks, micro)
    table = torch.zeros(num_rows * moe.num_experts, dtype=torch.float64, device=chosen.device)
    places = marks.rows[:, None] * moe.num_experts + chosen
    counted = marks.is_counted.to(torch.float64).repeat_interleave(chosen.shape[1])
    table.scatter_add_(0, places.flatten(), counted)
    return all_reduce(table, micro).view(num_rows, moe.num_experts)[marks.rows]


def _num_rows(marks: TokenMarks, micro: Group) -> int:
    return marks.numbers.shape[0] * micro.size // marks.row_length


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, tally: Tally, record: Record) -> Tensor:
        ctx.tally, ctx.record, ctx.loss_dtype = tally, record, loss.dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.record.add(ctx.tally)
        gradient = grad.new_tensor(ctx.record.loss_gradient, dtype=ctx.loss_dtype)
        return grad, gradient, None, None
