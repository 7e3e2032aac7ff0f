"""Context: the ranks that share the tokens of a sequence; a micro-batch, and where its tokens lie on them.

It owns what layers are told about that; attention across the ranks is context_attention's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from raymega.config.parallel import ParallelSection
from raymega.parallel.comm.process_groups import Group, Groups, alone
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.core.dropout import TokenKeys
from raymega.parallel.expert_parallel.token_ids import TokenIds
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.cp_layout import Segment, rank_ranges, segments

Documents = Sequence[Sequence[int]]
"""Lengths of the documents of each row of a micro-batch; a single entry stands for all rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Context-parallel ranks: ``inner`` ones exchange heads, ``outer`` ones pass keys and values.

    One of the two may have a single rank. The cp coordinate is outer.index * inner.size + inner.index.

    Attributes:
        inner: Neighbours that give each other their tokens of some heads, so that each attends with
            its heads over the tokens of all of them.
        outer: Ranks that keep their queries and get to see one another's keys and values.
        is_gathered: The outer ranks collect all keys and values at once, instead of a ring.
        log: Sees what the ranks send each other.
    """

    inner: Group
    outer: Group
    is_gathered: bool = False
    log: CommLog = field(default_factory=CommLog, compare=False, repr=False)

    @property
    def degree(self) -> int:
        """cp: how many ranks share the tokens."""
        return self.inner.size * self.outer.size

    @property
    def index(self) -> int:
        """This rank's coordinate on the cp axis."""
        return self.outer.index * self.inner.size + self.inner.index


def make_context(groups: Groups, parallel: ParallelSection, log: CommLog) -> Context:
    """The context that a job asks for; its groups were built for its method."""
    return Context(
        inner=groups.hierarchical_cp_size,
        outer=groups.cp_outer,
        is_gathered=parallel.cp_method == "all_gather",
        log=log,
    )


def make_contexts(groups: Groups, parallel: ParallelSection, log: CommLog) -> dict[int, Context]:
    """Those that a pack of documents may get under dynamic context parallelism, by their degree."""
    nobody = alone(groups.world.ranks[groups.world.index])
    is_gathered = parallel.cp_method == "all_gather"
    return {
        group.size: Context(inner=nobody, outer=group, is_gathered=is_gathered, log=log)
        for group in (nobody, *groups.nested)
    }


def no_context(rank: int = 0) -> Context:
    """The context of a rank that has all tokens of its rows."""
    return Context(inner=alone(rank), outer=alone(rank))


class Rows(NamedTuple):
    """What the rows of a micro-batch are made of.

    ``positions`` [B, S/cp] int64 are those of this rank's tokens in their documents, [1, S/cp] where
    all rows have the same; ``documents`` are lengths of the whole ones. ``context`` are the ranks
    that share the rows where that differs between micro-batches, and then ``row_positions`` [B, S/cp] are
    those of the tokens in their samples.
    """

    positions: Tensor
    documents: Documents
    context: Context | None = None
    row_positions: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one forward reads.

    Attributes:
        tokens: [B, S/cp] int64.
        labels: [B, S/cp] int64, the token after each token.
        mask: [B, S/cp] float32, 1 where the label counts; a slot without a sample is all 0.
        samples: [B] int64, global sample indices, counted from the start of the run; -1 without.
        positions: [B, S/cp] int64, place of each token in its document; [1, S/cp] where all rows have
            the same documents.
        documents: By row, lengths of its whole documents end to end; they add up to S. A single entry
            stands for all rows.
        context: The ranks that share this micro-batch out where not all have the same; then samples
            are [B, S/cp] and ``row_positions`` [B, S/cp] int64 those of the tokens in them.
        row_positions: See there.
        later: Labels and mask of as many tokens further ahead as the model predicts, [depth, B, S/cp]
            each; None where it predicts the next one alone.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    samples: Tensor
    positions: Tensor
    documents: Documents
    context: Context | None = None
    row_positions: Tensor | None = None
    later: tuple[Tensor, Tensor] | None = None

    @property
    def rows(self) -> Rows:
        """What its rows are made of."""
        return Rows(self.positions, self.documents, self.context, self.row_positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """Where the tokens of a micro-batch that this rank holds lie; made once for all layers of a stage.

    Attributes:
        positions: [S/cp, B] or [S/cp, 1] int64, of each token in its document.
        context: The ranks that share the tokens.
        segments: The documents as a rank holds them when attention is computed.
        order: In which order the tokens of the inner ranks, end to end, lie as one outer rank would
            hold them, and the inverse: [S/outer, B] or [S/outer, 1] int64. None without inner ranks.
        ends: [N + 1] int32, where the documents of all rows end, the rows end to end; None unless there
            are several in a row, and no outer ranks.
        keys: What dropout goes by; None drops nothing.
        rotations: What RoPE turns by; None is positions 0 to S - 1.
        token_ids: Which tokens of the micro-batch these are, and which count; None where no layer asks.
    """

    positions: Tensor
    context: Context
    segments: tuple[Segment, ...]
    order: tuple[Tensor, Tensor] | None
    ends: Tensor | None = None
    keys: TokenKeys | None = None
    rotations: tuple[Tensor, Tensor] | None = None
    token_ids: TokenIds | None = None

    @property
    def is_whole(self) -> bool:
        """All rows are one document, of which this rank has all tokens."""
        return self.context.degree == 1 and len(self.segments) == 1


def make_token_layout(rows: Rows, context: Context) -> TokenLayout:
    """TokenLayout of ``rows``, cut over ``context``; neither dropout nor turns."""
    held = segments(rows.documents, cp=context.outer.size)
    return TokenLayout(
        positions=rows.positions.t(),
        context=context,
        segments=held,
        order=_order(rows, context) if context.inner.size > 1 else None,
        ends=_ends(rows) if context.outer.size == 1 and len(held) > 1 else None,
    )


def make_token_ids(rows: Rows, mask: Tensor, context: Context, sp: SequenceParallel) -> TokenIds:
    """Marks of a micro-batch.

    Args:
        rows: What its rows are made of.
        mask: [B, S/cp], 1 where a token counts, else 0.
        context: The ranks that share the rows.
        sp: How they lie on the tensor-parallel ranks.
    """
    at = rows.row_positions
    if at is None:
        at = held_positions(rows.documents, context).to(mask.device)
    row_length = mask.shape[1] * context.degree
    first = torch.arange(mask.shape[0], device=mask.device)[:, None] * row_length
    return TokenIds(
        numbers=sp.share(sp.own((first + at).t()).flatten()),
        is_counted=sp.share(sp.own(mask.bool().t()).flatten()),
        row_length=row_length,
    )


def whole_rows(num_tokens: int, device: torch.device) -> Rows:
    """Rows of one document each, of which this rank has all tokens."""
    return Rows(torch.arange(num_tokens, device=device)[None], ((num_tokens,),))


def held_positions(documents: Documents, context: Context) -> Tensor:
    """Positions in the whole rows of the tokens that this rank holds: [rows, S/cp] int64."""
    return torch.stack([_held(row, context.degree, context.index) for row in documents])


def _ends(rows: Rows) -> Tensor:
    """Of the documents of all rows, row after row; the first begins at 0."""
    ends = [0, *accumulate(length for documents in rows.documents for length in documents)]
    return torch.tensor(ends, dtype=torch.int32, device=rows.positions.device)


def _held(lengths: Sequence[int], cp: int, cp_rank: int) -> Tensor:
    ranges = rank_ranges(lengths, cp=cp, cp_rank=cp_rank)
    return torch.cat([torch.arange(part.start, part.stop) for part in ranges])


def _order(rows: Rows, context: Context) -> tuple[Tensor, Tensor]:
    """The inner ranks' chunks together are those of their outer place; it has them by position."""
    first, degree = context.outer.index * context.inner.size, context.degree
    neighbours = range(first, first + context.inner.size)
    columns = [
        torch.cat([_held(lengths, degree, cp_rank) for cp_rank in neighbours])
        for lengths in rows.documents
    ]
    order = torch.stack(columns, 1).argsort(0).to(rows.positions.device)
    return order, order.argsort(0)
