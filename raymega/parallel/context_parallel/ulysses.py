"""All-to-all of attention heads: from some tokens of all heads to all tokens of some heads, and back.

DeepSpeed-Ulysses (Jacobs et al. 2023). Attention in between involves no other rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raymega.parallel.comm.process_groups import Group
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.context_parallel.transfers import exchange
from raymega.parallel.core.linear_map import apply_linear

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses(  # noqa: PLR0913  # three tensors and what is done with them
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranks: Group,
    order: tuple[Tensor, Tensor],
    log: CommLog,
) -> Tensor:
    """Run ``attend`` with this rank's share of the heads, over the tokens of all n ``ranks``.

    Args:
        attend: Function from q [N, B, H/n, K], k and v to [N, B, H/n, K], where N = n * S.
        q: Queries [S, B, H, K].
        k: Keys [S, B, G, K]; a head that several ranks read is sent to each of them.
        v: Values [S, B, G, K].
        ranks: Group of n ranks; n divides H, and divides G or is a multiple of it.
        order: Permutation of the ranks' tokens, end to end, into token order, and its inverse; [N, B] or
            [N, 1] int64.
        log: Log of the step, which tracks the transfers.

    Returns:
        Outputs [S, B, H, K].
    """
    there, back = order
    # fewer key heads than ranks: each is sent to n / G ranks
    copies = max(1, ranks.size // k.shape[2])
    k, v = (t.repeat_interleave(copies, dim=2) if copies > 1 else t for t in (k, v))
    # q, k and v travel in one all-to-all, cut by rank first so that each rank gets a share of all three
    shares = [t.unflatten(2, (ranks.size, -1)) for t in (q, k, v)]
    mixed = _to_heads(torch.cat(shares, dim=3).flatten(2, 3), ranks, log)
    mixed = _reorder(mixed, there, back)
    # attention over all tokens, then the way back
    y = attend(*mixed.split([share.shape[3] for share in shares], dim=2))
    return _to_tokens(_reorder(y, back, there), ranks, log)


def tokens_to_heads(x: Tensor, token_layout: TokenLayout) -> Tensor:
    """Exchange this rank's tokens for all tokens of some heads, in the order of the rows.

    Args:
        x: Heads of this rank's tokens, [S, B, h, K].
        token_layout: Layout of these tokens; its context's n ranks divide h.

    Returns:
        [n S, B, h/n, K]: the share of heads that is this rank's on ``inner``, of it that on ``outer``.
    """
    context = token_layout.context
    for ranks in (context.inner, context.outer):
        x = _to_heads(x, ranks, context.log) if ranks.size > 1 else x
    order = token_layout.row_order
    return x if order is None else _reorder(x, *order)


def heads_to_tokens(y: Tensor, token_layout: TokenLayout) -> Tensor:
    """Return what :func:`tokens_to_heads` exchanged, [n S, B, h/n, K], to its ranks: [S, B, h, K]."""
    context, order = token_layout.context, token_layout.row_order
    y = y if order is None else _reorder(y, *reversed(order))
    for ranks in (context.outer, context.inner):
        y = _to_tokens(y, ranks, context.log) if ranks.size > 1 else y
    return y


def _to_heads(x: Tensor, ranks: Group, log: CommLog) -> Tensor:
    """Exchange tokens for heads: [S, B, n h, K] -> [n S, B, h, K]."""
    return apply_linear(
        x, lambda y: _send_heads(y, ranks, log), lambda grad: _send_tokens(grad, ranks, log)
    )


def _to_tokens(x: Tensor, ranks: Group, log: CommLog) -> Tensor:
    """Exchange heads for tokens: [n S, B, h, K] -> [S, B, n h, K]."""
    return apply_linear(
        x, lambda y: _send_tokens(y, ranks, log), lambda grad: _send_heads(grad, ranks, log)
    )


def _reorder(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Return x[order] along dim 0, column by column.

    An order is a permutation, so backward is a gather by its inverse, without atomic adds.
    """
    return apply_linear(x, lambda y: _take(y, order), lambda grad: _take(grad, back))


def _send_heads(x: Tensor, ranks: Group, log: CommLog) -> Tensor:
    by_rank = x.unflatten(2, (ranks.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
    return exchange(by_rank, ranks, log).flatten(0, 1)


def _send_tokens(x: Tensor, ranks: Group, log: CommLog) -> Tensor:
    by_rank = exchange(x.contiguous(), ranks, log).unflatten(0, (ranks.size, -1))
    return by_rank.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Gather x [N, B, h, K] along dim 0 by ``order`` [N, B], or [N, 1] for all columns alike."""
    if order.shape[1] == 1:
        return x.index_select(0, order[:, 0])
    return x[order, torch.arange(x.shape[1], device=x.device)]
