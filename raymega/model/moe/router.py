"""Router: choice of each token's experts, and the weights of their outputs.

A token's scores and choices depend on that token alone. Exceptions are sinkhorn, the bias of loss-free
balancing and capacity, which use sums over all ranks that share the micro-batch or over the last step.
Ties go to the lower expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from raymega.config.moe import MoeSection
from raymega.model.moe.load_balancing import (
    LoadStats,
    Record,
    add_load,
    auxiliary_loss,
    join,
    shares_of,
    z_loss,
)
from raymega.parallel.comm.collectives import all_gather, all_reduce
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.core import rng
from raymega.parallel.core.dropout import place_key
from raymega.parallel.expert_parallel.dispatcher import Routing
from raymega.parallel.expert_parallel.token_ids import TokenIds
from raymega.parallel.tensor_parallel.layers import ParameterFactory
from raymega.plan.expert_capacity import capacity_share, reserved_rows

Tell = Callable[[Tensor, Tensor], None]
ROUTER_DTYPES = {"float32": torch.float32, "float64": torch.float64}
UNCOUNTED = 1 << 62
"""Offset on the numbers of masked tokens, so that they sort behind all others."""


class Router(nn.Module):
    """Router layer: linear, scores, choice; ``record`` accumulates the step's routing."""

    def __init__(self, factory: ParameterFactory, name: str, moe: MoeSection, micro: Group) -> None:
        super().__init__()
        self.moe, self.micro = moe, micro
        self.weight = factory.make(f"{name}.weight")
        self.linear_bias = factory.make_if_any(f"{name}.linear.bias")
        self.bias = factory.make_if_any(f"{name}.bias")
        self.counts = factory.make_if_any(f"{name}.counts")
        self.jitter_key = place_key(factory.seed, f"{name}.jitter")
        self.record = Record(name, moe.num_experts)

    def forward(
        self, x: Tensor, token_ids: TokenIds, keys: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Route tokens.

        Args:
            x: Tokens of this rank's share of the micro-batch, [T, D].
            token_ids: Identity of these tokens.
            keys: Random keys of jitter, [T] int64; None turns jitter off.

        Returns:
            x, whose backward starts that of the router's losses too, and the tokens' routing.
        """
        moe = self.moe
        # scores; they need a graph for the balancing loss only
        logits = self._logits(x, keys)
        with torch.set_grad_enabled(moe.has_aux_loss and torch.is_grad_enabled()):
            scores = (
                logits.softmax(-1) if moe.router_score_function == "softmax" else logits.sigmoid()
            )
        # top-k choice and combine weights
        chosen, gaps = self._choose(logits, scores, token_ids)
        load_stats = LoadStats(token_ids=token_ids, gaps=gaps)
        tell = partial(self.record.add, load_stats)
        weights = gate_weights(logits, scores.detach(), chosen, moe, tell)
        # capacity and routing
        totals = self._totals(chosen, token_ids)
        routing = self._routing(chosen, weights, totals, load_stats)
        # auxiliary losses, attached to x
        balance = auxiliary_loss(
            moe, scores, chosen, token_ids, totals=totals, last=self.counts, micro=self.micro
        )
        for name, loss in (("balance", balance), ("z", z_loss(moe, logits, token_ids))):
            if loss is not None:
                x, load_stats.losses[name] = join(x, loss, self.record), loss.detach()
        return x, routing

    def _logits(self, x: Tensor, keys: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, ROUTER_DTYPES[self.moe.router_dtype])
        seen = x.to(wide)
        if self.moe.router_jitter_noise and keys is not None and self.training:
            seen = seen * jitter(
                keys + self.jitter_key, x.shape[1], self.moe.router_jitter_noise, wide
            )
        bias = None if self.linear_bias is None else self.linear_bias.to(wide)
        return linear(seen, self.weight.to(wide), bias)

    @torch.no_grad()
    def _choose(self, logits: Tensor, scores: Tensor, token_ids: TokenIds) -> tuple[Tensor, Tensor]:
        moe = self.moe
        if moe.load_balancing_type == "sinkhorn" and self.training:
            is_counted = token_ids.is_counted
            choice = logits + sinkhorn(logits, is_counted, self.micro, rounds=moe.sinkhorn_rounds)
        else:
            choice = scores if self.bias is None else scores + self.bias.to(scores.dtype)
        return choose(choice, moe)

    def _totals(self, chosen: Tensor, token_ids: TokenIds) -> Tensor | None:
        """Return load by expert and tokens of the whole micro-batch, [E + 1]; None where unused."""
        moe = self.moe
        is_level = moe.has_aux_loss and moe.load_balancing_type == "micro_batch"
        if not is_level and not moe.capacity_factor:
            return None
        counts = add_load(chosen, token_ids, token_ids.counted.new_zeros(moe.num_experts))
        return all_reduce(torch.cat((counts, token_ids.num_counted[None])), self.micro)

    def _routing(
        self, chosen: Tensor, weights: Tensor, totals: Tensor | None, load_stats: LoadStats
    ) -> Routing:
        """Return the routing of these choices; ``load_stats`` counts what a capacity drops."""
        moe, token_ids, num_tokens = self.moe, load_stats.token_ids, chosen.shape[0]
        if totals is None or not moe.capacity_factor:
            return Routing(experts=chosen, weights=weights, num_experts=moe.num_experts)
        capacity = (totals[-1] * capacity_share(moe)).ceil()
        experts, gap = apply_capacity(chosen, weights, token_ids, capacity, moe, self.micro)
        load_stats.gaps = torch.minimum(load_stats.gaps, gap)
        load_stats.kept = ((experts < moe.num_experts) & token_ids.is_counted[:, None]).sum()
        rows = reserved_rows(moe, num_tokens=num_tokens, num_ranks=self.micro.size)
        return Routing(
            experts=experts,
            weights=weights,
            num_experts=moe.num_experts,
            capacity=rows if moe.pad_expert_input_to_capacity else 0,
            is_dropping=True,
        )


def choose(scores: Tensor, moe: MoeSection) -> tuple[Tensor, Tensor]:
    """Return the top_k experts of each token, best first, within its best groups of experts.

    Args:
        scores: Scores that decide, [T, E].
        moe: Section with top_k, n_group, topk_group and group_score.

    Returns:
        Chosen experts, [T, k] int64, and the margin of the last one over the next, [T].
    """
    if moe.n_group == 1:
        return _best(scores, moe.top_k)
    # best groups (DeepSeek-V3: by the sum of each group's two best scores)
    grouped = scores.unflatten(1, (moe.n_group, -1))
    best = grouped.topk(2 if moe.group_score == "top2" else 1, dim=2).values.sum(2)
    groups, gaps = _best(best, moe.topk_group)
    is_open = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, value=True)
    # best experts within them
    scores = grouped.masked_fill(~is_open[:, :, None], -torch.inf).flatten(1)
    chosen, gap = _best(scores, moe.top_k)
    return chosen, torch.minimum(gap, gaps)


def gate_weights(
    logits: Tensor, scores: Tensor, chosen: Tensor, moe: MoeSection, tell: Tell
) -> Tensor:
    """Return the weights of the chosen experts' outputs, [T, k]; backward reaches the logits.

    Args:
        logits: Router logits, [T, E].
        scores: Scores of the logits, [T, E], detached.
        chosen: Chosen experts, [T, k] int64.
        moe: Section with the score function, norm_topk_prob and routed_scaling_factor.
        tell: Callback in backward with the normalised scores [T, E] and ``chosen``.
    """
    return _WeighChoices.apply(logits, scores, chosen, moe, tell)


@torch.no_grad()
def sinkhorn(logits: Tensor, is_counted: Tensor, micro: Group, *, rounds: int) -> Tensor:
    """Return an offset on each expert's logit, [E], that evens the micro-batch's mean load.

    Rows of exp(logits + offset) are scaled to one sum and columns to another, ``rounds`` times (Sinkhorn
    and Knopp 1967; as in BASE layers and Megatron).

    Args:
        logits: Router logits, [T, E].
        is_counted: Tokens that take part, [T] bool.
        micro: Group of the ranks that share the micro-batch.
        rounds: Number of iterations.
    """
    counted = is_counted.to(logits.dtype)
    offset = logits.new_zeros(logits.shape[1])
    for _ in range(rounds):
        rows = (logits + offset).softmax(-1)
        columns = all_reduce(counted @ rows, micro)
        offset = offset - columns.clamp(min=torch.finfo(logits.dtype).tiny).log()
        offset = offset - offset.mean()
    return offset


@torch.no_grad()
def apply_capacity(  # what one choice is ordered by
    chosen: Tensor,
    weights: Tensor,
    token_ids: TokenIds,
    capacity: Tensor,
    moe: MoeSection,
    micro: Group,
) -> tuple[Tensor, Tensor]:
    """Drop the choices of each expert beyond its first ``capacity``.

    Unmasked tokens come first; then larger weights, if moe.token_drop_policy is ``probability``; then
    tokens earlier in the micro-batch.

    Args:
        chosen: Chosen experts, [T, k] int64.
        weights: Weights of the choices, [T, k].
        token_ids: Identity of the T tokens.
        capacity: Choices that an expert takes of the whole micro-batch, a scalar.
        moe: Section with token_drop_policy and num_experts.
        micro: Group of the ranks that share the micro-batch, with T tokens each.

    Returns:
        Experts, [T, k] int64, E where a choice is dropped; and the least margin in weight of a kept choice
        over a dropped one, a scalar, infinite where no weight decided.
    """
    num_tokens, k = chosen.shape
    numbers = torch.where(token_ids.is_counted, token_ids.numbers, token_ids.numbers + UNCOUNTED)
    # every rank sees all choices of the micro-batch, so all drop the same
    of_all = all_gather(torch.cat((chosen, numbers[:, None]), 1), micro)
    experts, keys = of_all[:, :k].flatten(), of_all[:, k].repeat_interleave(k)
    # sort by key, from the least to the most significant: number, weight, masked, expert
    order = keys.argsort(stable=True)
    weight = None
    if moe.token_drop_policy == "probability":
        weight = all_gather(weights.contiguous(), micro).flatten()
        order = order[weight[order].argsort(descending=True, stable=True)]
        order = order[(keys[order] >= UNCOUNTED).to(torch.uint8).argsort(stable=True)]
    order = order[experts[order].argsort(stable=True)]
    ordered = experts[order]
    # position of each choice in its expert's queue
    starts = torch.searchsorted(ordered, torch.arange(moe.num_experts, device=chosen.device))
    positions = torch.arange(order.shape[0], device=chosen.device) - starts[ordered]
    kept = torch.empty_like(ordered, dtype=torch.bool).scatter_(0, order, positions < capacity)
    own = kept.view(micro.size, num_tokens, k)[micro.index]
    # margin at the border between kept and dropped
    gap = weights.new_full((), torch.inf)
    if weight is not None:
        is_border = (positions[1:] == capacity) & (ordered[1:] == ordered[:-1])
        is_border &= keys[order[1:]] < UNCOUNTED
        steps = weight[order[:-1]] - weight[order[1:]]
        gap = torch.cat((torch.where(is_border, steps, torch.inf), gap[None])).min()
    return torch.where(own, chosen, moe.num_experts), gap


def jitter(keys: Tensor, width: int, most: float, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [1 - most, 1 + most], [T, width], from keys [T] int64."""
    steps = torch.arange(1, width + 1, device=keys.device) * rng.signed(rng.GOLDEN_GAMMA)
    words = rng.splitmix(keys[:, None] + steps)
    # The upper 24 bits as a signed number: exact in any dtype that a router computes in.
    return 1 + (words >> 40).to(dtype) * (most * 2.0**-23)


class _WeighChoices(torch.autograd.Function):
    """Combine weights w = scaling p / sum(p), or scaling p, of the chosen scores p."""

    @staticmethod
    def forward(
        ctx: Any, _logits: Tensor, scores: Tensor, chosen: Tensor, moe: MoeSection, tell: Tell
    ) -> Tensor:
        weights = scores.gather(1, chosen)
        total = weights.sum(-1, keepdim=True) if moe.norm_topk_prob else None
        if total is not None:
            weights = weights / total
        if moe.routed_scaling_factor != 1.0:
            weights = weights * moe.routed_scaling_factor
        ctx.save_for_backward(scores, chosen, weights, total)
        ctx.moe, ctx.tell = moe, tell
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return dL/dlogits from p dL/dp = w g - w sum(w g) / scaling, g = dL/dw; the sum if normalised."""
        scores, chosen, weights, total = ctx.saved_tensors
        ctx.tell(shares_of(scores, ctx.moe), chosen)
        moved = weights * grad
        if total is not None:
            moved.addcmul_(
                weights, moved.sum(-1, keepdim=True), value=-1 / ctx.moe.routed_scaling_factor
            )
        grad_logits = torch.zeros_like(scores)
        # sigmoid' = p (1 - p); the factor p is in ``moved`` already
        if ctx.moe.router_score_function == "sigmoid":
            return grad_logits.scatter_(1, chosen, moved * (1 - scores.gather(1, chosen))), *NONE
        grad_logits.scatter_(1, chosen, moved)
        if total is None:  # softmax's sum term; it cancels where weights are normalised
            grad_logits.addcmul_(scores, moved.sum(-1, keepdim=True), value=-1)
        return grad_logits, *NONE


NONE = (None, None, None, None)


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return indices of the k largest of each row, ties to the lower, and the margin to the next."""
    if k == scores.shape[1]:
        token_layout = scores.sort(dim=1, descending=True, stable=True).indices
        return token_layout, scores.new_full(scores.shape[:1], torch.inf)
    if scores.device.type == "cpu" and scores.numel():
        ordered, token_layout = scores.topk(k + 1, dim=1)
        gaps = ordered[:, :-1] - ordered[:, 1:]
        if (
            gaps.min() > 0
        ):  # no ties: topk, faster than a stable sort on a CPU, gives the same order
            return token_layout[:, :k].contiguous(), gaps[:, -1]
    ordered, token_layout = scores.sort(dim=1, descending=True, stable=True)
    return token_layout[:, :k].contiguous(), ordered[:, k - 1] - ordered[:, k]
