"""Capacity: which choices of a micro-batch an expert keeps when more tokens choose it than it takes.

The order is the same on any layout: all ranks that share the micro-batch see all its choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raymega.config.moe import MoeSection
from raymega.parallel.comm.collectives import all_gather
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.expert_parallel.token_ids import TokenIds


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


UNCOUNTED = 1 << 62
"""Added to the number of a token that does not count."""
