"""CodedBucket: a bucket of frozen weights as codes and scales, decoded around each use.

The weights of a unit exist in the compute dtype only while it is used. `parallel/core/block_codes.py` has the
arithmetic, and `data_parallel/param_buffer.py` says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from raymega.parallel.comm.collectives import all_reduce, start_all_gather_into
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.comm.work import Work
from raymega.parallel.core.block_codes import (
    Scales,
    block_maxima,
    decode_into,
    decode_scales,
    encode,
    encode_scales,
    pack,
)
from raymega.parallel.core.buckets import Bucket, Range, Span
from raymega.parallel.core.shard_spec import Piece
from raymega.plan.layers.base_blocks import SCALE_BLOCK, box_blocks, row_blocks
from raymega.plan.zero_levels import ZeroLevel


@dataclass(frozen=True, kw_only=True, slots=True)
class _PieceScales:
    """Scales of a piece's blocks.

    Attributes:
        piece: Block of a global tensor of M matrices.
        codes: Codes of the scales of the piece's blocks, [M, R, n] uint8.
        second: Second-level scales of the whole matrices, [M, k] float32.
        mean: Mean scales of the whole matrices, [M] float32.
    """

    piece: Piece
    codes: Tensor
    second: Tensor
    mean: Tensor

    def values(self) -> Tensor:
        """Return the scales, [M, R, n] float32."""
        row, first = self.piece.box.offset[-2], box_blocks(self.piece.box)[0]
        _, rows, blocks = self.codes.shape
        device = self.codes.device
        # places among all scales of the matrix
        at_row = torch.arange(row, row + rows, device=device) * row_blocks(
            self.piece.tensor.shape[-1]
        )
        places = at_row[:, None] + torch.arange(first, first + blocks, device=device)
        return decode_scales(self.codes, places // SCALE_BLOCK, self.second, self.mean)


class CodedBucket:
    """Codes of this rank's part of a bucket, and the scales of all its weights.

    Args:
        bucket: Bucket of frozen weights.
        owned: Part whose codes the rank keeps: all of it, or its share at level ``parameters``.
        cut: Ranks with the other parts of the bucket's tensors: tp, or etp of experts.
    """

    def __init__(self, bucket: Bucket, owned: Range, cut: Group) -> None:
        self.bucket, self._owned, self._cut = bucket, owned, cut
        self.base_dtype = bucket.base_dtype
        self.codes = torch.empty(0, dtype=torch.uint8)
        """Packed codes of the part that this rank keeps, [elements * bits / 8] uint8."""
        self.scales: list[list[_PieceScales]] = []
        self._whole: Tensor | None = None

    @property
    def is_in_parts(self) -> bool:
        """True where ranks keep parts of the codes, and gather them before a use."""
        return self.bucket.level == ZeroLevel.PARAMETERS

    def encode(self, flat: Tensor) -> None:
        """Take the weights of ``flat`` [bucket.size]; all ranks that share a tensor call it together.

        Where the codes are in parts, the values outside this rank's part must be zeros or the weights themselves.
        """
        codes = torch.zeros(flat.numel(), dtype=torch.uint8, device=flat.device)
        self.scales = []
        for span in self.bucket.spans:
            rows = _rows(flat, span)
            first, maxima = _first_column(span), self._maxima(rows, span)
            here = codes[span.start : span.stop].view(rows.shape)
            here.copy_(encode(rows, maxima, first, self.base_dtype))
        # the codes of other parts are gathered for a use
        self.codes = pack(codes[self._owned.place], self.base_dtype).clone()

    def start_fetch(self) -> Work:
        """Start to gather the codes from the ranks that keep parts."""
        inside = self.bucket.sharing.inside
        self._whole = self.codes.new_empty(inside.size * self.codes.numel())
        return start_all_gather_into(self._whole, self.codes, inside)

    def forget_fetched(self) -> None:
        """Let go of gathered codes."""
        self._whole = None

    def decode(self, flat: Tensor) -> None:
        """Write the weights to ``flat`` [bucket.size], and let go of gathered codes."""
        whole = self.codes if self._whole is None else self._whole
        for span, scales in zip(self.bucket.spans, self.scales, strict=True):
            rows = _rows(flat, span)
            found = torch.cat([each.values() for each in scales], dim=1).flatten(0, 1)
            decode_into(
                rows,
                whole,
                found,
                first=_first_column(span),
                base_dtype=self.base_dtype,
                start=span.start,
            )
        self._whole = None

    def _maxima(self, rows: Tensor, span: Span) -> Tensor:
        """Return the largest magnitude of each block of a parameter's rows, of the whole tensor: [R, n] float32.

        The scales of the parameter's pieces are kept.
        """
        first, spec = _first_column(span), span.param.spec
        # experts follow each other in the rows, and in each the pieces do
        local = block_maxima(rows, first)
        matrices = spec.shape[0] if spec.is_expert else 1
        by_matrix = local.view(matrices, -1, local.shape[1])
        kept, at = [], 0
        for piece in spec.pieces:
            count = piece.box.shape[-2]
            here = by_matrix[:, at : at + count]
            scales, largest = self._scales(piece, here)
            here.copy_(largest)
            kept.append(scales)
            at += count
        self.scales.append(kept)
        return local

    def _scales(self, piece: Piece, local: Tensor) -> tuple[_PieceScales, Tensor]:
        """Return the scales of a piece, and its blocks' largest magnitudes on all ranks, from those of this rank [M, R, n]."""
        *_, out, columns = piece.tensor.shape
        row, first = piece.box.offset[-2], box_blocks(piece.box)[0]
        place = slice(None), slice(row, row + local.shape[1]), slice(first, first + local.shape[2])
        # all scales of each matrix, as a scale of scales may be of rows of several ranks
        whole = local.new_zeros(local.shape[0], out, row_blocks(columns))
        whole[place] = local
        if piece.box.shape[-2:] != piece.tensor.shape[-2:]:
            all_reduce(whole, self._cut, "max")
        if self.is_in_parts:
            all_reduce(whole, self.bucket.sharing.inside, "max")
        found: Scales = encode_scales(whole.flatten(1))
        # of these the rank keeps the codes of its own blocks
        codes = found.codes.view(whole.shape)[place].clone()
        return _PieceScales(piece=piece, codes=codes, second=found.second, mean=found.mean), whole[
            place
        ]


def held_bytes(coded: Sequence[CodedBucket]) -> int:
    """Return the bytes of codes and scales that a rank keeps."""
    scales = [each for bucket in coded for kept in bucket.scales for each in kept]
    tensors = [bucket.codes for bucket in coded]
    tensors += [tensor for each in scales for tensor in (each.codes, each.second, each.mean)]
    return sum(tensor.nbytes for tensor in tensors)


def _rows(flat: Tensor, span: Span) -> Tensor:
    """Return a view of a parameter's weights in ``flat``, [R, N]: experts' rows follow each other."""
    shape = span.param.spec.shape
    return flat[span.start : span.stop].view(prod(shape[:-1]), shape[-1])


def _first_column(span: Span) -> int:
    return span.param.spec.pieces[0].box.offset[-1]
