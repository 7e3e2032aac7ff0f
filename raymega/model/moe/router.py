"""The router: which experts work on a token, and by what weight each is added.

Scores and choices of a token depend on that token alone but for sinkhorn, the bias of a past step and
capacity, which go by sums over all ranks that share the micro-batch. Ties go to the lower expert.
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
"""Added to the number of a token that does not count."""


class Router(nn.Module):
    """Linear, scores, choice; ``record`` gathers what the choices of a step were."""

    def __init__(self, factory: ParameterFactory, name: str, moe: MoeSection, micro: Group) -> None:
        super().__init__()
        self.moe, self.micro = moe, micro
        self.weight = factory.make(f"{name}.weight")
        self.bias = factory.make_if_any(f"{name}.bias")
        self.counts = factory.make_if_any(f"{name}.counts")
        self.jitter_key = place_key(factory.seed, f"{name}.jitter")
        self.record = Record(name, moe.num_experts)

    def forward(
        self, x: Tensor, token_ids: TokenIds, keys: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Route tokens.

        Args:
            x: [T, D], this rank's share of the micro-batch's tokens.
            token_ids: Of the same.
            keys: [T] int64 that jitter goes by; None for none.

        Returns:
            x, in whose backward the losses of the router come in, and where each token goes.
        """
        moe = self.moe
        logits = self._logits(x, keys)
        with torch.set_grad_enabled(moe.has_aux_loss and torch.is_grad_enabled()):
            scores = (
                logits.softmax(-1) if moe.router_score_function == "softmax" else logits.sigmoid()
            )
        chosen, gaps = self._choose(logits, scores, token_ids)
        load_stats = LoadStats(token_ids=token_ids, gaps=gaps)
        tell = partial(self.record.add, load_stats)
        weights = gate_weights(logits, scores.detach(), chosen, moe, tell)
        totals = self._totals(chosen, token_ids)
        routing = self._routing(chosen, weights, totals, load_stats)
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
        return linear(seen, self.weight.to(wide))

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
        """[E + 1]: load by expert and tokens of the whole micro-batch; None where nobody asks."""
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
    """The top_k experts of each token, best first, within its best groups of experts.

    Args:
        scores: [T, E].
        moe: Of which it reads top_k and what it says of groups.

    Returns:
        [T, k] int64, and by how much the last choice was better than the next: [T].
    """
    if moe.n_group == 1:
        return _best(scores, moe.top_k)
    grouped = scores.unflatten(1, (moe.n_group, -1))
    best = grouped.topk(2 if moe.group_score == "top2" else 1, dim=2).values.sum(2)
    groups, gaps = _best(best, moe.topk_group)
    is_open = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, value=True)
    scores = grouped.masked_fill(~is_open[:, :, None], -torch.inf).flatten(1)
    chosen, gap = _best(scores, moe.top_k)
    return chosen, torch.minimum(gap, gaps)


def gate_weights(
    logits: Tensor, scores: Tensor, chosen: Tensor, moe: MoeSection, tell: Tell
) -> Tensor:
    """By what each chosen expert's output is weighed; its backward goes to the logits.

    Args:
        logits: [T, E].
        scores: [T, E], of the logits; autograd does not see them.
        chosen: [T, k] int64.
        moe: Of which it reads score, norm_topk_prob and scaling.
        tell: Called in backward with the shares [T, E] and ``chosen``.

    Returns:
        [T, k].
    """
    return _WeighChoices.apply(logits, scores, chosen, moe, tell)


@torch.no_grad()
def sinkhorn(logits: Tensor, is_counted: Tensor, micro: Group, *, rounds: int) -> Tensor:
    """What to add to each expert's logit so that the micro-batch's load is even, in the mean.

    Rows of exp(logits + it) are scaled to one sum, columns to another, ``rounds`` times (Sinkhorn and
    Knopp 1967; as BASE layers and Megatron use it).

    Args:
        logits: [T, E].
        is_counted: [T] bool, tokens that take part.
        micro: The ranks that share the micro-batch.
        rounds: So often.

    Returns:
        [E].
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
    """Drop what is beyond the first ``capacity`` choices of each expert.

    Tokens that count come before those that do not; then by weight, if moe.token_drop_policy says so; then the
    first of the micro-batch.

    Args:
        chosen: [T, k] int64.
        weights: [T, k].
        token_ids: Of the T tokens.
        capacity: A scalar, of the micro-batch.
        moe: Of which it reads token_drop_policy.
        micro: The ranks that share the micro-batch, with T tokens each.

    Returns:
        [T, k] int64, E where a choice is dropped; and by how much the weight of a choice that was kept was
        above that of the one that was not, at the least: a scalar, infinite where no weight decided.
    """
    num_tokens, k = chosen.shape
    numbers = torch.where(token_ids.is_counted, token_ids.numbers, token_ids.numbers + UNCOUNTED)
    of_all = all_gather(torch.cat((chosen, numbers[:, None]), 1), micro)
    experts, keys = of_all[:, :k].flatten(), of_all[:, k].repeat_interleave(k)
    order = keys.argsort(stable=True)
    weight = None
    if moe.token_drop_policy == "probability":
        weight = all_gather(weights.contiguous(), micro).flatten()
        order = order[weight[order].argsort(descending=True, stable=True)]
        order = order[(keys[order] >= UNCOUNTED).to(torch.uint8).argsort(stable=True)]
    order = order[experts[order].argsort(stable=True)]
    ordered = experts[order]
    starts = torch.searchsorted(ordered, torch.arange(moe.num_experts, device=chosen.device))
    positions = torch.arange(order.shape[0], device=chosen.device) - starts[ordered]
    kept = torch.empty_like(ordered, dtype=torch.bool).scatter_(0, order, positions < capacity)
    own = kept.view(micro.size, num_tokens, k)[micro.index]
    gap = weights.new_tensor(torch.inf)
    if weight is not None:
        is_border = (positions[1:] == capacity) & (ordered[1:] == ordered[:-1])
        is_border &= keys[order[1:]] < UNCOUNTED
        steps = weight[order[:-1]] - weight[order[1:]]
        gap = torch.cat((torch.where(is_border, steps, torch.inf), gap[None])).min()
    return torch.where(own, chosen, moe.num_experts), gap


def jitter(keys: Tensor, width: int, most: float, dtype: torch.dtype) -> Tensor:
    """Numbers in [1 - most, 1 + most], even spread; keys: [T] int64 -> [T, width]."""
    steps = torch.arange(1, width + 1, device=keys.device) * rng.signed(rng.GOLDEN_GAMMA)
    words = rng.splitmix(keys[:, None] + steps)
    # The upper 24 bits as a signed number: exact in any dtype that a router computes in.
    return 1 + (words >> 40).to(dtype) * (most * 2.0**-23)


class _WeighChoices(torch.autograd.Function):
    """w = scaling p / sum(p), or scaling p, for the chosen scores p."""

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
        """With g = dL/dw: p dL/dp = w g - w sum(w g) / scaling, of which the latter is normalising's."""
        scores, chosen, weights, total = ctx.saved_tensors
        ctx.tell(shares_of(scores, ctx.moe), chosen)
        moved = weights * grad
        if total is not None:
            moved.addcmul_(
                weights, moved.sum(-1, keepdim=True), value=-1 / ctx.moe.routed_scaling_factor
            )
        grad_logits = torch.zeros_like(scores)
        if ctx.moe.router_score_function == "sigmoid":
            return grad_logits.scatter_(1, chosen, moved * (1 - scores.gather(1, chosen))), *NONE
        grad_logits.scatter_(1, chosen, moved)
        if total is None:  # what is normalised does not change when all scores grow alike
            grad_logits.addcmul_(scores, moved.sum(-1, keepdim=True), value=-1)
        return grad_logits, *NONE


NONE = (None, None, None, None)


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Places of the k largest of each row, the lower first where two are equal; gap to the next."""
    if k == scores.shape[1]:
        token_layout = scores.sort(dim=1, descending=True, stable=True).indices
        return token_layout, scores.new_full(scores.shape[:1], torch.inf)
    if scores.device.type == "cpu" and scores.numel():
        ordered, token_layout = scores.topk(k + 1, dim=1)
        gaps = ordered[:, :-1] - ordered[:, 1:]
        if gaps.min() > 0:  # no two are equal, so there is one order
            return token_layout[:, :k].contiguous(), gaps[:, -1]
    ordered, token_layout = scores.sort(dim=1, descending=True, stable=True)
    return token_layout[:, :k].contiguous(), ordered[:, k - 1] - ordered[:, k]
