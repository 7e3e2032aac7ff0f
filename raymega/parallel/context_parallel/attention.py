"""Attention of a rank's queries over the keys and values of all context-parallel ranks.

Ring (Liu et al. 2023): keys and values travel round a ring, and a rank attends to one block while the
next arrives. All-gather: a rank collects all of them at once and meanwhile attends to its own. Both
merge partial outputs by their log-sum-exp, in fp32 or better. Inner ranks exchange heads first (Ulysses).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from raymega.parallel.comm.trace import Waitable
from raymega.parallel.context_parallel.attention_blocks import (
    PLAIN,
    AttentionTile,
    ScoreRules,
    kernel_for,
)
from raymega.parallel.context_parallel.attention_work import (
    AttentionSlopes,
    AttentionTotal,
    AttentionWork,
)
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.context_parallel.transfers import start_collection, start_pass, sum_parts
from raymega.parallel.context_parallel.ulysses import Attend, ulysses
from raymega.parallel.context_parallel.varlen_attention import attend_in_documents, has_one_kernel
from raymega.parallel.workarounds.matmul import is_emulated
from raymega.plan.cp_layout import Segment


def attend(  # noqa: PLR0913  # what a layer's attention depends on
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_layout: TokenLayout,
    *,
    on_whole_rows: Attend | None = None,
    rules: ScoreRules = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v within each document, causal unless the rules say otherwise.

    Args:
        q: Queries [S/cp, B, H, K].
        k: Keys [S/cp, B, G, K]; H / G neighbouring query heads read one key head.
        v: Values [S/cp, B, G, V], V at most K.
        token_layout: Placement of these tokens on the context-parallel ranks.
        on_whole_rows: Function that replaces torch's kernels where no outer ranks take part.
        rules: Window and cap of the scores, and whether they are causal.
        sinks: Score of a key without a value, [H]; None is no such key.

    Returns:
        Outputs [S/cp, B, H, V].
    """
    width = v.shape[-1]
    if width < q.shape[-1]:
        # Fused kernels and the ring need values as wide as keys: pad with zeros, and cut the zero outputs off.
        v = pad(v, (0, q.shape[-1] - width))
        y = attend(q, k, v, token_layout, on_whole_rows=on_whole_rows, rules=rules, sinks=sinks)
        return y[..., :width]
    context = token_layout.context
    # outer ranks: ring or all-gather of keys and values, inside the exchange of heads
    inside = on_whole_rows or partial(_across, token_layout=token_layout, rules=rules, sinks=sinks)
    # inner ranks: exchange of heads around it
    if context.inner.size == 1:
        return inside(q, k, v)
    assert token_layout.order is not None, "inner ranks have an order"
    return ulysses(inside, q, k, v, ranks=context.inner, order=token_layout.order, log=context.log)


def _across(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    token_layout: TokenLayout,
    rules: ScoreRules,
    sinks: Tensor | None,
) -> Tensor:
    """Attend over the keys of the outer ranks, within documents or whole rows."""
    outer, segments = token_layout.context.outer, token_layout.segments
    function = _Gathered if token_layout.context.is_gathered and outer.size > 1 else _Ring
    work = AttentionWork(ranks=outer, segments=segments, log=token_layout.context.log, rules=rules)
    if sinks is not None:
        # inner ranks: this rank's share of the heads
        first = token_layout.context.inner.index * q.shape[2]
        return function.apply(q, k, v, work, sinks[first : first + q.shape[2]])
    if not rules.is_plain:
        return function.apply(q, k, v, work, None)
    # one rank: torch's kernels, for whole rows or for documents
    if outer.size == 1 and len(segments) == 1:
        return _whole_rows(q, k, v, is_causal=rules.is_causal)
    if token_layout.ends is not None and has_one_kernel(q):
        return attend_in_documents(
            q, k, v, ends=token_layout.ends, longest=max(segment.size for segment in segments),
            are_alike=segments[0].rows == slice(None), is_causal=rules.is_causal,
        )  # fmt: skip
    # several ranks, or documents that no kernel serves: block by block
    return function.apply(q, k, v, work, None)


def _whole_rows(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    q_BHSK, k_BGSK, v_BGSK = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    if is_emulated(q):
        return _WholeRows.apply(q_BHSK, k_BGSK, v_BGSK, is_causal).permute(2, 0, 1, 3)
    is_shared = k.shape[2] < q.shape[2]
    y_BHSK = scaled_dot_product_attention(
        q_BHSK, k_BGSK, v_BGSK, is_causal=is_causal, enable_gqa=is_shared
    )
    return y_BHSK.permute(2, 0, 1, 3)


class _WholeRows(torch.autograd.Function):
    """Attention on CPUs without 16-bit instructions, by the kernel of `attention_blocks.py`.

    torch's own backward would multiply 16-bit numbers one by one there.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:  # noqa: FBT001  # by position
        ctx.is_causal = is_causal
        out, log_sum_exp = kernel_for(q).forward(q, k, v, is_causal=is_causal)
        # torch's kernel lays its output out like this, so the next layer needs no copy.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum_exp = ctx.saved_tensors
        whole = AttentionTile(out, log_sum_exp)
        return *kernel_for(q).backward(grad, q, k, v, whole, is_causal=ctx.is_causal), None


class _Ring(torch.autograd.Function):
    """Ring attention.

    Forward starts with a rank's own keys and values and passes them to the next rank. Backward starts
    with those that arrived last and passes them the other way. Their gradients follow one hop behind,
    so both end at the rank that owns them.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: AttentionWork, sinks: Tensor | None
    ) -> Tensor:
        ring = work.ranks
        q, kv = q.contiguous(), torch.stack((k, v))
        total = AttentionTotal(q, work, is_merged=ring.size > 1)
        for hop in range(ring.size):
            is_last = hop + 1 == ring.size
            # send this block on, attend to it meanwhile, then take the next
            arriving, pending = (kv, None) if is_last else start_pass(kv, ring, work.log, by=1)
            source = (ring.index - hop) % ring.size
            total.add(kv, work.of_rank(source), is_first=hop == 0)
            if pending is not None:
                pending.wait(ring.timeout_s)
                kv = arriving
        out = total.finish(sinks)
        ctx.save_for_backward(q, kv, out, total.log_sum_exp, sinks)
        ctx.work = work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, log_sum_exp, sinks = ctx.saved_tensors
        work: AttentionWork = ctx.work
        ring = work.ranks
        slopes = AttentionSlopes(grad.contiguous(), q, AttentionTile(out, log_sum_exp), work)
        coming: tuple[Tensor, Waitable] | None = None
        for hop in range(ring.size):
            is_last = hop + 1 == ring.size
            # send this block back, and compute its gradients meanwhile
            arriving, pending = (kv, None) if is_last else start_pass(kv, ring, work.log, by=-1)
            source = (ring.index + 1 + hop) % ring.size
            grad_kv = slopes.by(kv, work.of_rank(source))
            # add the terms of the ranks that had this block before
            if coming is not None:
                so_far, travel = coming
                travel.wait(ring.timeout_s)
                grad_kv += so_far
            # The sum leaves one hop after its block; the last one stays, because it is home.
            if pending is not None:
                coming = start_pass(grad_kv, ring, work.log, by=-1)
                pending.wait(ring.timeout_s)
                kv = arriving
        grad_k, grad_v = grad_kv.to(q.dtype).unbind(0)
        return slopes.q.to(q.dtype), grad_k, grad_v, None, slopes.by_sinks(sinks)


class _Gathered(torch.autograd.Function):
    """All-gather attention; saves only the rank's own keys and values, and gathers again in backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: AttentionWork, sinks: Tensor | None
    ) -> Tensor:
        q, kv = q.contiguous(), torch.stack((k, v))
        total = AttentionTotal(q, work, is_merged=True)
        ranks = work.ranks
        # gather, and attend to the rank's own keys meanwhile
        by_rank, pending = start_collection(kv, ranks, work.log)
        total.add(kv, work.of_rank(ranks.index), is_first=True)
        pending.wait(ranks.timeout_s)
        # the other ranks' keys, in token order
        whole = _in_order(by_rank.unflatten(0, (ranks.size, 2)), work.segments)
        total.add(whole, work.of_others())
        out = total.finish(sinks)
        ctx.save_for_backward(q, kv, out, total.log_sum_exp, sinks)
        ctx.work = work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, log_sum_exp, sinks = ctx.saved_tensors
        work: AttentionWork = ctx.work
        ranks, segments = work.ranks, work.segments
        # gather again, with the gradients of the rank's own keys meanwhile
        by_rank, pending = start_collection(kv, ranks, work.log)
        slopes = AttentionSlopes(grad.contiguous(), q, AttentionTile(out, log_sum_exp), work)
        grad_kv = slopes.by(kv, work.of_rank(ranks.index))
        pending.wait(ranks.timeout_s)
        # gradients of the other ranks' keys
        by_rank = by_rank.unflatten(0, (ranks.size, 2))
        whole = _in_order(by_rank, segments)
        others = slopes.by(whole, work.of_others())
        # back to rank order, then reduce-scatter to the owners
        terms = torch.zeros_like(by_rank, dtype=others.dtype)
        for place, held in _pairs(others, terms, segments):
            held.copy_(place)
        grad_kv += sum_parts(terms.flatten(0, 1), ranks, work.log)
        grad_k, grad_v = grad_kv.to(q.dtype).unbind(0)
        return slopes.q.to(q.dtype), grad_k, grad_v, None, slopes.by_sinks(sinks)


def _in_order(by_rank: Tensor, segments: Iterable[Segment]) -> Tensor:
    """Copy keys and values from rank order [n, 2, S, B, G, K] to token order [2, n S, B, G, K]."""
    num_ranks, two, tokens, *rest = by_rank.shape
    whole = by_rank.new_empty((two, num_ranks * tokens, *rest))
    for place, held in _pairs(whole, by_rank, segments):
        place.copy_(held)
    return whole


def _pairs(
    whole: Tensor, by_rank: Tensor, segments: Iterable[Segment]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each chunk of the whole rows [2, n S, B, ...] with the view of the rank that holds it."""
    num_ranks = by_rank.shape[0]
    for segment in segments:
        # Rank r of n holds chunks r and 2n-1-r of each segment, which balances causal work.
        chunk, begin = segment.size // 2, segment.start * num_ranks
        for rank in range(num_ranks):
            for number, held in ((rank, segment.early), (2 * num_ranks - 1 - rank, segment.late)):
                first = begin + number * chunk
                yield (
                    whole[:, first : first + chunk, segment.rows],
                    by_rank[rank, :, held, segment.rows],
                )
