"""Sums of attention over blocks of keys: which blocks there are, outputs and gradients so far.

`attention.py` decides when the keys of other ranks arrive; `attention_blocks.py` computes one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raymega.parallel.comm.process_groups import Group
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel.attention_blocks import (
    PLAIN,
    AttentionTile,
    Kernel,
    MathAttention,
    ScoreRules,
    kernel_for,
    merge,
    merge_sinks,
    sink_gradient,
)
from raymega.plan.cp_layout import AttentionPart, Segment, gathered_parts, ring_parts, tiled_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWork:
    """The blocks of attention between this rank's queries and the keys of all ``ranks``."""

    ranks: Group
    segments: tuple[Segment, ...]
    log: CommLog
    rules: ScoreRules = PLAIN

    def kernel(self, q: Tensor, part: AttentionPart) -> Kernel:
        """Return the kernel that computes a block of the queries ``q``."""
        return kernel_for(q) if self.rules.is_plain else MathAttention(self.rules, part.distance)

    def _tiles(
        self, segment: Segment, source: int, *, is_gathered: bool = False
    ) -> Iterator[AttentionPart]:
        return tiled_parts(
            segment, here=self.ranks.index, source=source, num_places=self.ranks.size,
            window=self.rules.window, chunk=self.rules.chunk, is_gathered=is_gathered,
        )  # fmt: skip

    def of_rank(self, source: int) -> Iterator[tuple[slice, AttentionPart]]:
        """Yield rows and block for each group of keys that the rank at place ``source`` holds."""
        for segment in self.segments:
            if not self.rules.is_plain:
                yield from ((segment.rows, part) for part in self._tiles(segment, source))
                continue
            parts = ring_parts(
                segment, here=self.ranks.index, source=source, is_causal=self.rules.is_causal
            )
            yield from ((segment.rows, part) for part in parts)

    def of_others(self) -> Iterator[tuple[slice, AttentionPart]]:
        """Yield rows and block for all keys that other ranks hold, as gathered into whole rows."""
        here, num_places = self.ranks.index, self.ranks.size
        for segment in self.segments:
            if not self.rules.is_plain:
                for source in set(range(num_places)) - {here}:
                    for part in self._tiles(segment, source, is_gathered=True):
                        yield segment.rows, part
                continue
            parts = gathered_parts(
                segment, here=here, num_places=num_places, is_causal=self.rules.is_causal
            )
            yield from ((segment.rows, part) for part in parts)


class AttentionTotal:
    """Attention over the keys so far: output [S, B, H, K] and log-sum-exp [B, H, S].

    The output is fp32 or better where blocks are merged, and else has the format of the queries.
    """

    def __init__(self, q: Tensor, work: AttentionWork, *, is_merged: bool) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self._q, self._work = q, work
        is_merged |= not work.rules.is_plain
        self.out = torch.empty_like(
            q, dtype=wide if is_merged else q.dtype, memory_format=torch.contiguous_format
        )
        self.log_sum_exp = q.new_empty((q.shape[1], q.shape[2], q.shape[0]), dtype=wide)
        # Several blocks of the rank's own keys: none is first, so start from attention to nothing.
        if not work.rules.is_plain:
            self.out.zero_()
            self.log_sum_exp.fill_(-torch.inf)

    def add(
        self, kv: Tensor, parts: Iterable[tuple[slice, AttentionPart]], *, is_first: bool = False
    ) -> None:
        """Attend to more keys. With ``is_first`` overwrite: every query sees some of these keys."""
        for rows, part in parts:
            q, k, v = _block_of(self._q, kv, rows, part)
            kernel = self._work.kernel(q, part)
            block = kernel.forward(q, k, v, is_causal=part.is_causal)
            into = _rows_of(AttentionTile(self.out, self.log_sum_exp), rows, part)
            if is_first and self._work.rules.is_plain:
                into.out.copy_(block.out)
                into.log_sum_exp.copy_(block.log_sum_exp)
            else:
                merge(into, block)

    def finish(self, sinks: Tensor | None) -> Tensor:
        """Return the output in the format of the queries, after the keys without values, if any."""
        if sinks is not None:
            merge_sinks(AttentionTile(self.out.permute(1, 2, 0, 3), self.log_sum_exp), sinks)
        return self.out.to(self._q.dtype)


class AttentionSlopes:
    """Gradients of the queries so far, [S, B, H, K] in fp32 or better."""

    def __init__(self, grad: Tensor, q: Tensor, whole: AttentionTile, work: AttentionWork) -> None:
        self._grad, self._q, self._whole, self._work = grad, q, whole, work
        wide = torch.promote_types(q.dtype, torch.float32)
        self.q = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)

    def by(self, kv: Tensor, parts: Iterable[tuple[slice, AttentionPart]]) -> Tensor:
        """Return the gradients of ``kv`` [2, T, B, G, K] in fp32 or better, and add to those of the queries."""
        grad_kv = torch.zeros_like(kv, dtype=self.q.dtype)
        for rows, part in parts:
            q, k, v = _block_of(self._q, kv, rows, part)
            grad = self._grad[part.queries, rows].permute(1, 2, 0, 3)
            whole = _rows_of(self._whole, rows, part)
            kernel = self._work.kernel(q, part)
            found = kernel.backward(grad, q, k, v, whole, is_causal=part.is_causal)
            self.q[part.queries, rows] += found.q.permute(2, 0, 1, 3)
            grad_kv[0, part.keys, rows] += found.k.permute(2, 0, 1, 3)
            grad_kv[1, part.keys, rows] += found.v.permute(2, 0, 1, 3)
        return grad_kv

    def by_sinks(self, sinks: Tensor | None) -> Tensor | None:
        """Return the gradient of the scores of keys without values, [H]."""
        if sinks is None:
            return None
        out = self._whole.out.permute(1, 2, 0, 3)
        whole = AttentionTile(out, self._whole.log_sum_exp)
        return sink_gradient(self._grad.permute(1, 2, 0, 3), sinks, whole)


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
