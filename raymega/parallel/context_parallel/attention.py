"""Attention of a rank's queries over the keys and values of all context-parallel ranks.

Ring (Liu et al. 2023): keys and values travel round a ring, and a rank attends to one block while the
next arrives. All-gather: a rank collects all of them at once and meanwhile attends to its own. Both
merge partial outputs by their log-sum-exp, in fp32 or better. Inner ranks exchange heads first (Ulysses).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from raymega.parallel.comm.process_groups import Group
from raymega.parallel.comm.trace import CommLog, Waitable
from raymega.parallel.context_parallel.attention_blocks import AttentionTile, kernel_for, merge
from raymega.parallel.context_parallel.context import TokenLayout
from raymega.parallel.context_parallel.transfers import start_collection, start_pass, sum_parts
from raymega.parallel.context_parallel.ulysses import Attend, ulysses
from raymega.parallel.context_parallel.varlen_attention import attend_in_documents, has_one_kernel
from raymega.parallel.workarounds.matmul import is_emulated
from raymega.plan.cp_layout import AttentionPart, Segment, gathered_parts, ring_parts


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_layout: TokenLayout,
    *,
    on_whole_rows: Attend | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(K)) v, causal within each document.

    Args:
        q: Queries [S/cp, B, H, K].
        k: Keys [S/cp, B, G, K]; H / G neighbouring query heads read one key head.
        v: Values [S/cp, B, G, V], V at most K.
        token_layout: Placement of these tokens on the context-parallel ranks.
        on_whole_rows: Function that replaces torch's kernels where no outer ranks take part.

    Returns:
        Outputs [S/cp, B, H, V].
    """
    width = v.shape[-1]
    if width < q.shape[-1]:
        # Fused kernels and the ring need values as wide as keys: pad with zeros, and cut the zero outputs off.
        v = pad(v, (0, q.shape[-1] - width))
        return attend(q, k, v, token_layout, on_whole_rows=on_whole_rows)[..., :width]
    context = token_layout.context
    # outer ranks: ring or all-gather of keys and values, inside the exchange of heads
    inside = on_whole_rows or partial(_across, token_layout=token_layout)
    # inner ranks: exchange of heads around it
    if context.inner.size == 1:
        return inside(q, k, v)
    assert token_layout.order is not None, "inner ranks have an order"
    return ulysses(inside, q, k, v, ranks=context.inner, order=token_layout.order, log=context.log)


def _across(q: Tensor, k: Tensor, v: Tensor, *, token_layout: TokenLayout) -> Tensor:
    """Attend over the keys of the outer ranks, within documents or whole rows."""
    outer, segments = token_layout.context.outer, token_layout.segments
    # one rank: torch's kernels, for whole rows or for documents
    if outer.size == 1 and len(segments) == 1:
        return _whole_rows(q, k, v)
    if token_layout.ends is not None and has_one_kernel(q):
        return attend_in_documents(
            q, k, v, ends=token_layout.ends, longest=max(segment.size for segment in segments),
            are_alike=segments[0].rows == slice(None),
        )  # fmt: skip
    # several ranks, or documents that no kernel serves: block by block
    function = _Gathered if token_layout.context.is_gathered and outer.size > 1 else _Ring
    work = _Work(ranks=outer, segments=segments, log=token_layout.context.log)
    return function.apply(q, k, v, work)


def _whole_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q_BHSK, k_BGSK, v_BGSK = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    if is_emulated(q):
        return _WholeRows.apply(q_BHSK, k_BGSK, v_BGSK).permute(2, 0, 1, 3)
    is_shared = k.shape[2] < q.shape[2]
    y_BHSK = scaled_dot_product_attention(
        q_BHSK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=is_shared
    )
    return y_BHSK.permute(2, 0, 1, 3)


class _WholeRows(torch.autograd.Function):
    """Causal attention on CPUs without 16-bit instructions, by the kernel of `attention_blocks.py`.

    torch's own backward would multiply 16-bit numbers one by one there.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, log_sum_exp = kernel_for(q).forward(q, k, v, is_causal=True)
        # torch's kernel lays its output out like this, so the next layer needs no copy.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum_exp = ctx.saved_tensors
        whole = AttentionTile(out, log_sum_exp)
        return kernel_for(q).backward(grad, q, k, v, whole, is_causal=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """The blocks of attention between this rank's queries and the keys of all ``ranks``."""

    ranks: Group
    segments: tuple[Segment, ...]
    log: CommLog

    def of_rank(self, source: int) -> Iterator[tuple[slice, AttentionPart]]:
        """Yield rows and block for each group of keys that the rank at place ``source`` holds."""
        for segment in self.segments:
            for part in ring_parts(segment, here=self.ranks.index, source=source, is_causal=True):
                yield segment.rows, part

    def of_others(self) -> Iterator[tuple[slice, AttentionPart]]:
        """Yield rows and block for all keys that other ranks hold, as gathered into whole rows."""
        here, num_places = self.ranks.index, self.ranks.size
        for segment in self.segments:
            for part in gathered_parts(segment, here=here, num_places=num_places, is_causal=True):
                yield segment.rows, part


class _Ring(torch.autograd.Function):
    """Ring attention.

    Forward starts with a rank's own keys and values and passes them to the next rank. Backward starts
    with those that arrived last and passes them the other way. Their gradients follow one hop behind,
    so both end at the rank that owns them.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: _Work) -> Tensor:
        ring = work.ranks
        q, kv = q.contiguous(), torch.stack((k, v))
        total = _Total(q, is_merged=ring.size > 1)
        for hop in range(ring.size):
            is_last = hop + 1 == ring.size
            # send this block on, attend to it meanwhile, then take the next
            arriving, pending = (kv, None) if is_last else start_pass(kv, ring, work.log, by=1)
            source = (ring.index - hop) % ring.size
            total.add(kv, work.of_rank(source), is_first=hop == 0)
            if pending is not None:
                pending.wait(ring.timeout_s)
                kv = arriving
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, total.log_sum_exp)
        ctx.work = work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, log_sum_exp = ctx.saved_tensors
        work: _Work = ctx.work
        ring = work.ranks
        slopes = _Slopes(grad.contiguous(), q, AttentionTile(out, log_sum_exp))
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
        return slopes.q.to(q.dtype), grad_k, grad_v, None


class _Gathered(torch.autograd.Function):
    """All-gather attention; saves only the rank's own keys and values, and gathers again in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: _Work) -> Tensor:
        q, kv = q.contiguous(), torch.stack((k, v))
        total = _Total(q, is_merged=True)
        ranks = work.ranks
        # gather, and attend to the rank's own keys meanwhile
        by_rank, pending = start_collection(kv, ranks, work.log)
        total.add(kv, work.of_rank(ranks.index), is_first=True)
        pending.wait(ranks.timeout_s)
        # the other ranks' keys, in token order
        whole = _in_order(by_rank.unflatten(0, (ranks.size, 2)), work.segments)
        total.add(whole, work.of_others())
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, total.log_sum_exp)
        ctx.work = work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, log_sum_exp = ctx.saved_tensors
        work: _Work = ctx.work
        ranks, segments = work.ranks, work.segments
        # gather again, with the gradients of the rank's own keys meanwhile
        by_rank, pending = start_collection(kv, ranks, work.log)
        slopes = _Slopes(grad.contiguous(), q, AttentionTile(out, log_sum_exp))
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
        return slopes.q.to(q.dtype), grad_k, grad_v, None


class _Total:
    """Attention over the keys so far: output [S, B, H, K] and log-sum-exp [B, H, S].

    The output is fp32 or better where blocks are merged, and else has the format of the queries.
    """

    def __init__(self, q: Tensor, *, is_merged: bool) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self._q, self._kernel = q, kernel_for(q)
        self.out = torch.empty_like(
            q, dtype=wide if is_merged else q.dtype, memory_format=torch.contiguous_format
        )
        self.log_sum_exp = q.new_empty((q.shape[1], q.shape[2], q.shape[0]), dtype=wide)

    def add(
        self, kv: Tensor, parts: Iterable[tuple[slice, AttentionPart]], *, is_first: bool = False
    ) -> None:
        """Attend to more keys. With ``is_first`` overwrite: every query sees some of these keys."""
        for rows, part in parts:
            q, k, v = _block_of(self._q, kv, rows, part)
            block = self._kernel.forward(q, k, v, is_causal=part.is_causal)
            into = _rows_of(AttentionTile(self.out, self.log_sum_exp), rows, part)
            if is_first:
                into.out.copy_(block.out)
                into.log_sum_exp.copy_(block.log_sum_exp)
            else:
                merge(into, block)


class _Slopes:
    """Gradients of the queries so far, [S, B, H, K] in fp32 or better."""

    def __init__(self, grad: Tensor, q: Tensor, whole: AttentionTile) -> None:
        self._grad, self._q, self._whole, self._kernel = grad, q, whole, kernel_for(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        self.q = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)

    def by(self, kv: Tensor, parts: Iterable[tuple[slice, AttentionPart]]) -> Tensor:
        """Return the gradients of ``kv`` [2, T, B, G, K] in fp32 or better, and add to those of the queries."""
        grad_kv = torch.zeros_like(kv, dtype=self.q.dtype)
        for rows, part in parts:
            q, k, v = _block_of(self._q, kv, rows, part)
            grad = self._grad[part.queries, rows].permute(1, 2, 0, 3)
            whole = _rows_of(self._whole, rows, part)
            found = self._kernel.backward(grad, q, k, v, whole, is_causal=part.is_causal)
            self.q[part.queries, rows] += found.q.permute(2, 0, 1, 3)
            grad_kv[0, part.keys, rows] += found.k.permute(2, 0, 1, 3)
            grad_kv[1, part.keys, rows] += found.v.permute(2, 0, 1, 3)
        return grad_kv


def _block_of(
    q: Tensor, kv: Tensor, rows: slice, part: AttentionPart
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one block, [B, heads, S, K] each."""
    tensors = q[part.queries, rows], kv[0, part.keys, rows], kv[1, part.keys, rows]
    a, b, c = (t.permute(1, 2, 0, 3) for t in tensors)
    return a, b, c


def _rows_of(total: AttentionTile, rows: slice, part: AttentionPart) -> AttentionTile:
    """Return views of the output rows that belong to a block's queries."""
    out = total.out[part.queries, rows].permute(1, 2, 0, 3)
    return AttentionTile(out, total.log_sum_exp[rows, :, part.queries])


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
