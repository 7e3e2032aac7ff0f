"""Context: the ranks that share a sequence's tokens; MicroBatch and TokenLayout: tokens and placement.

Layers read these values; attention across the ranks is in `attention.py`.
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
from raymega.parallel.context_parallel.images import Images
from raymega.parallel.context_parallel.stream_places import Places
from raymega.parallel.core.dropout import TokenKeys
from raymega.parallel.expert_parallel.token_ids import TokenIds
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.cp_layout import Segment, rank_ranges, segments

Documents = Sequence[Sequence[int]]
"""Lengths of the documents of each row of a micro-batch; a single entry stands for all rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Context-parallel ranks: ``inner`` ones exchange heads, ``outer`` ones send keys and values.

    Either may have a single rank. The cp coordinate is outer.index * inner.size + inner.index.

    Attributes:
        inner: Neighbours that exchange heads (Ulysses): each attends with its share of the heads over
            the tokens of all of them.
        outer: Ranks that keep their queries and receive one another's keys and values.
        is_gathered: True where the outer ranks all-gather keys and values; False for a ring.
        log: Log of the step, which tracks the transfers.
    """

    inner: Group
    outer: Group
    is_gathered: bool = False
    log: CommLog = field(default_factory=CommLog, compare=False, repr=False)

    @property
    def degree(self) -> int:
        """Number of ranks that share the tokens (cp)."""
        return self.inner.size * self.outer.size

    @property
    def index(self) -> int:
        """Coordinate of this rank on the cp axis."""
        return self.outer.index * self.inner.size + self.inner.index


def make_context(groups: Groups, parallel: ParallelSection, log: CommLog) -> Context:
    """Return the context for the job's ``parallel.cp_method``, whose groups are built already."""
    return Context(
        inner=groups.cp_inner,
        outer=groups.cp_outer,
        is_gathered=parallel.cp_method == "all_gather",
        log=log,
    )


def make_contexts(groups: Groups, parallel: ParallelSection, log: CommLog) -> dict[int, Context]:
    """Return the contexts that dynamic context parallelism chooses from, by degree 1, 2, 4, ..."""
    nobody = alone(groups.world.ranks[groups.world.index])
    is_gathered = parallel.cp_method == "all_gather"
    return {
        group.size: Context(inner=nobody, outer=group, is_gathered=is_gathered, log=log)
        for group in (nobody, *groups.nested)
    }


def no_context(rank: int = 0) -> Context:
    """Return the context of a rank that holds all tokens of its rows."""
    return Context(inner=alone(rank), outer=alone(rank))


class Rows(NamedTuple):
    """Documents and positions of a micro-batch's rows.

    Attributes:
        positions: Positions [B, S/cp] int64 of this rank's tokens in their documents; [1, S/cp] where all
            rows have the same documents.
        documents: Lengths of the whole documents, by row.
        context: Ranks that share the rows, where these differ between micro-batches.
        row_positions: Positions [B, S/cp] int64 of the tokens in their samples; [1, S/cp] where all rows
            have the same documents.
        ends: See TokenLayout.
        order: See TokenLayout.
        streams: See TokenLayout.
        images: See TokenLayout.
        axes: Positions [3, B, S/cp] int64 of this rank's tokens in time, row and column; None without M-RoPE.

    What depends on documents and rank alone is None where :func:`make_token_layout` and others are to
    compute it. A loader computes it ahead, because a forward that did would wait for a copy to the device.
    """

    positions: Tensor
    documents: Documents
    context: Context | None = None
    row_positions: Tensor | None = None
    ends: Tensor | None = None
    order: tuple[Tensor, Tensor] | None = None
    streams: tuple[Places, Places] | None = None
    images: Images | None = None
    axes: Tensor | None = None


class EncoderInput(NamedTuple):
    """Input of encoders beside the tokens of a micro-batch.

    Attributes:
        token_types: Segment of each token, [B, S/cp] int64.
        first: Places of the first tokens of this rank's pairs, [N] int64: position here * B + row.
        labels: Class of each pair, [N] int64: 0 where B follows A, else 1.
    """

    token_types: Tensor
    first: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PairBatch:
    """Pairs of a chosen and a rejected answer in the rows of a micro-batch: P pairs, 2 P answers.

    Attributes:
        answers: Number of the answer that each token is of, [B, S/cp] int64; 2 P where it is of none. The chosen
            answer of pair p is number 2 p, the rejected one 2 p + 1.
        counts: Number of labels of each whole answer that count, [2 P] float64.
        is_counted: 1 where both answers of a pair have a label that counts, else 0: [P] float64.
        num_counted: Number of pairs that this rank counts: their sum on cp rank 0, 0 elsewhere.
        reference: Log-probability of each whole answer by the reference model, [2 P] float64; None where the loss
            asks for none, and before it is known.
        is_desirable: kto only: 1 where a pair's first answer is desirable, else 0: [P] float64. Its second one is an
            answer to another prompt.
        baseline: kto only, known before a step's passes, [3] float64: divergence from the reference, and number of
            all answers of the batch over that of the desirable and of the undesirable ones.
    """

    answers: Tensor
    counts: Tensor
    is_counted: Tensor
    num_counted: int
    reference: Tensor | None = None
    is_desirable: Tensor | None = None
    baseline: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Contrast:
    """Loss of pairs of documents among all pairs of a batch, and its derivative.

    Attributes:
        losses: Loss of each pair, [P] float64.
        is_right: 1 where a pair's anchor is most similar to its own positive, [P] float64.
        slopes: Derivative of the sum of all losses of the batch by the pooled states, [2 P, D] float64.
    """

    losses: Tensor
    is_right: Tensor
    slopes: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreBatch:
    """Documents whose scores the loss reads, in the rows of a micro-batch: N documents in G groups of equal size.

    A group is a document with classes, a question's choices, or a pair of answers.

    Attributes:
        places: Places of this rank's tokens that scores are read at, [T] int64: position here * B + row.
        documents: Number of the document of each of these tokens, [T] int64.
        weights: Weight of each of these tokens in its document's scores, [T] float64; over all ranks they sum to 1.
        labels: Class or right choice of each group, [G] int64, or its value, float64; 0 where the loss reads none.
        is_counted: 1 where a group counts, else 0: [G] float64.
        num_documents: N.
        num_counted: Number of groups that this rank counts: their sum on cp rank 0, 0 elsewhere.
        contrast: Loss of these pairs among those of the whole batch, on ranks of the last stage; None for other heads.
    """

    places: Tensor
    documents: Tensor
    weights: Tensor
    labels: Tensor
    is_counted: Tensor
    num_documents: int
    num_counted: int
    contrast: Contrast | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherBatch:
    """Answer of a teacher on the tokens of a micro-batch: a live one's residual stream, or stored logits.

    Attributes:
        hidden: Residual stream behind the teacher's blocks, [S/(cp*sp), B, D], on ranks of the last stage.
        ids: Tokens whose logits are stored, [B, S/cp, k] int64.
        logits: The teacher's logits of these, [B, S/cp, k] float32.
    """

    hidden: Tensor | None = None
    ids: Tensor | None = None
    logits: Tensor | None = None


LossInput = PairBatch | ScoreBatch | TeacherBatch
"""Input of a loss beside the labels of a micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Input of one forward pass.

    Attributes:
        tokens: Token ids [B, S/cp] int64.
        labels: Next token of each token, [B, S/cp] int64.
        mask: Loss mask [B, S/cp] float32: 1 where the label counts; all 0 in a slot without a sample.
        num_counted: Number of labels that count, known to the host: sum of ``mask``.
        samples: Global sample indices [B] int64, counted from the start of the run; -1 in an empty slot.
            [B, S/cp] where ranks share documents anew in each micro-batch: one for each token.
        rows: Documents of its rows, and positions in them.
        later: Labels and masks, [depth, B, S/cp] each, of the tokens further ahead that the model
            predicts; None where it predicts only the next one.
        encoder: Token types and pairs of segments; None where the model is no encoder.
        pairs: Pairs of answers, or documents with scores; None where the loss is that of tokens.
        teacher: Answer of a teacher on the tokens; None without one, and before it is known.
        image_counts: Tokens of this rank that stand for patches, and images that these are, known to the host.
    """

    tokens: Tensor
    labels: Tensor
    mask: Tensor
    num_counted: int
    samples: Tensor
    rows: Rows
    later: tuple[Tensor, Tensor] | None = None
    encoder: EncoderInput | None = None
    pairs: PairBatch | ScoreBatch | None = None
    teacher: TeacherBatch | None = None
    image_counts: tuple[int, float] = (0, 0.0)

    @property
    def divisor(self) -> int:
        """Share of this rank in the number that divides the batch's loss: its labels, pairs or documents."""
        return self.num_counted if self.pairs is None else self.pairs.num_counted


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """Placement of the tokens of a micro-batch that this rank holds; made once for all layers of a stage.

    Attributes:
        positions: Position of each token in its document, [S/cp, B] or [S/cp, 1] int64.
        context: Ranks that share the tokens.
        segments: Documents, as the rank holds them when attention is computed.
        order: Permutation from the inner ranks' tokens, end to end, to the order in which one outer rank
            would hold them, and its inverse: [S/outer, B] or [S/outer, 1] int64. None without inner ranks.
        ends: Cumulative lengths [N + 1] int32 of the documents of all rows, end to end. None where all
            rows are one document, or outer ranks exist.
        keys: Keys of the dropout masks; None where nothing is dropped.
        rotations: Cosines and sines of RoPE; None is positions 0 to S - 1.
        local_rotations: The same of sliding layers, where these have a base of their own.
        token_ids: Numbers of these tokens in the micro-batch, and which count; None where no layer asks.
        row_order: Permutation from the tokens of all context-parallel ranks, end to end, to the order of the
            rows, and its inverse: [S, B] or [S, 1] int64. None where no layer asks, or this rank has all.
        whole_positions: Position of each of the rows' tokens in its document, as ``row_order``.
        streams: Places of the encoder's tokens, which come first, and of the decoder's; None in other families.
        images: Images of the rows; None where the model reads none, and behind the first stage.
    """

    positions: Tensor
    context: Context
    segments: tuple[Segment, ...]
    order: tuple[Tensor, Tensor] | None
    ends: Tensor | None = None
    keys: TokenKeys | None = None
    rotations: tuple[Tensor, Tensor] | None = None
    local_rotations: tuple[Tensor, Tensor] | None = None
    token_ids: TokenIds | None = None
    row_order: tuple[Tensor, Tensor] | None = None
    whole_positions: Tensor | None = None
    streams: tuple[Places, Places] | None = None
    images: Images | None = None

    @property
    def row_positions(self) -> Tensor:
        """Position of each token of the whole rows in its document, [S, B] or [S, 1] int64."""
        if self.whole_positions is not None:
            return self.whole_positions
        assert self.context.degree == 1, "a layer that reads whole rows has asked for their order"
        return self.positions

    @property
    def is_whole(self) -> bool:
        """True where each row is one document, of which this rank holds all tokens."""
        return self.context.degree == 1 and len(self.segments) == 1


def make_token_layout(rows: Rows, context: Context, *, has_whole_rows: bool = False) -> TokenLayout:
    """Return the TokenLayout of ``rows``, cut over ``context``, without dropout keys and rotations.

    ``has_whole_rows`` says that some layer exchanges tokens for heads over all of ``context``.
    """
    rows = complete_rows(rows, context)
    row_order = whole = None
    if has_whole_rows and context.degree > 1:
        device, documents = rows.positions.device, rows.documents
        there = _order(documents, range(context.degree), context.degree).to(device)
        row_order = there, there.argsort(0)
        columns = [torch.cat([torch.arange(n) for n in lengths]) for lengths in documents]
        whole = torch.stack(columns, 1).to(device)
    return TokenLayout(
        row_order=row_order,
        whole_positions=whole,
        positions=rows.positions.t(),
        context=context,
        segments=segments(rows.documents, cp=context.outer.size),
        order=rows.order,
        ends=rows.ends,
        streams=rows.streams,
        images=rows.images,
    )


def complete_rows(rows: Rows, context: Context) -> Rows:
    """Return ``rows`` with all that attention over ``context`` reads, on the device of their positions."""
    device, is_packed = rows.positions.device, sum(map(len, rows.documents)) > 1
    ends, order = rows.ends, rows.order
    if ends is None and is_packed and context.outer.size == 1:
        ends = _ends(rows.documents).to(device)
    if order is None and context.inner.size > 1:
        first, inner = context.outer.index * context.inner.size, context.inner.size
        there = _order(rows.documents, range(first, first + inner), context.degree).to(device)
        order = there, there.argsort(0)
    return rows._replace(ends=ends, order=order)


def row_positions(rows: Rows, context: Context) -> Tensor:
    """Return the positions of this rank's tokens in their samples, [B, S/cp] or [1, S/cp] int64."""
    if rows.row_positions is not None:
        return rows.row_positions
    return held_positions(rows.documents, context).to(rows.positions.device)


def make_token_ids(rows: Rows, mask: Tensor, context: Context, sp: SequenceParallel) -> TokenIds:
    """Return the TokenIds of a micro-batch's tokens on this rank.

    Args:
        rows: Documents and positions of its rows.
        mask: Loss mask [B, S/cp]: 1 where a token counts, else 0.
        context: Ranks that share the rows.
        sp: Placement of the residual stream on the tensor-parallel ranks.
    """
    # A token's number is its row times the row's length, plus its position in the row.
    at = row_positions(rows, context)
    row_length = mask.shape[1] * context.degree
    first = torch.arange(mask.shape[0], device=mask.device)[:, None] * row_length
    return TokenIds(
        numbers=sp.share(sp.own((first + at).t()).flatten()),
        is_counted=sp.share(sp.own(mask.bool().t()).flatten()),
        row_length=row_length,
    )


def whole_rows(num_tokens: int, device: torch.device) -> Rows:
    """Return rows of one document each, of which this rank holds all tokens."""
    return Rows(torch.arange(num_tokens, device=device)[None], ((num_tokens,),))


def held_positions(documents: Documents, context: Context) -> Tensor:
    """Return the positions, in the whole rows, of the tokens that this rank holds: [rows, S/cp] int64."""
    return torch.stack([_held(row, context.degree, context.index) for row in documents])


def _ends(rows: Documents) -> Tensor:
    """Return the cumulative lengths [N + 1] of the documents of all rows, row after row, from 0."""
    ends = [0, *accumulate(length for documents in rows for length in documents)]
    return torch.tensor(ends, dtype=torch.int32)


def _held(lengths: Sequence[int], cp: int, cp_rank: int) -> Tensor:
    ranges = rank_ranges(lengths, cp=cp, cp_rank=cp_rank)
    return torch.cat([torch.arange(part.start, part.stop) for part in ranges])


def _order(rows: Documents, ranks: Sequence[int], cp: int) -> Tensor:
    """Return the permutation that sorts the tokens of ``ranks``, of ``cp`` ones, by position.

    Together inner ranks hold the chunks of one outer rank, which has them by position.
    """
    columns = [torch.cat([_held(lengths, cp, cp_rank) for cp_rank in ranks]) for lengths in rows]
    return torch.stack(columns, 1).argsort(0)
