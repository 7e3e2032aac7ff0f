"""GradBuffer: where gradients are summed, over micro-batches and then over ranks.

Which part of a sum a rank keeps is buckets'; what the sum is divided by is train.step's; who
updates with it is optim's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from raymega.errors import Fault, InternalError
from raymega.parallel.comm.collectives import start_all_reduce, start_reduce_scatter_in_place
from raymega.parallel.comm.process_groups import Group, Groups
from raymega.parallel.comm.trace import CommLog, Waitable
from raymega.parallel.core.buckets import Bucket, BucketTable, Range, piece_boxes
from raymega.parallel.core.shard_spec import Piece
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.data_parallel.grad_accumulator import GradientSum, GradSink
from raymega.plan.tensor_table import GlobalTensor
from raymega.plan.zero_levels import ZeroLevel

MOST_TRAVELLING = 1
"""Micro-batches' buckets on their way while the next one fills: what sharded gradients take beside
the sums that a rank owns is so many buckets and one."""


class _Travelling(NamedTuple):
    """One micro-batch's gradients on their way."""

    bucket: Bucket
    flat: torch.Tensor
    reduction: Waitable


class GradBuffer:
    """Gradients in float32 or better, which layers add here or a hook takes from ``param.grad``.

    Up to level ``optimizer`` a bucket sums all micro-batches on its rank, and leaves in the last
    backward, as soon as its last gradient is there and all buckets that should be full before it have
    left: so the ranks launch in one order, whatever arrived when. From ``gradients`` on it leaves in
    every backward, as soon as it is full, and this rank adds its part of the sum over the others to
    what it owns: more it does not keep. A parameter that got no gradient counts as zero.
    """

    def __init__(self, table: BucketTable, groups: Groups, *, log: CommLog | None = None) -> None:
        self._table, self._groups, self._log = table, groups, log or CommLog()
        self._device = table.buckets[0].spans[0].param.device
        self._order = sorted(table.buckets, key=_order_of_backward)
        self._kept = [bucket for bucket in self._order if bucket.level < ZeroLevel.GRADIENTS]
        self._sums = self._make_sums()
        self._owned = [self._make_owned(bucket) for bucket in table.buckets]
        self._filling: dict[int, GradientSum] = {}
        self._travelling: list[_Travelling] = []
        self._without_any: set[int] = set()
        self._last_chunks: set[int] = set()
        self._left: set[int] = set()
        self._launched: dict[int, Waitable] = {}
        self._summing: _PartialSum | None = None
        for bucket in table.buckets:
            grad_sink = GradSink(partial(self._sum_of, bucket), partial(self._complete, bucket))
            for param, _ in bucket.spans:
                if param.requires_grad:
                    param.grad_sink = grad_sink
                    param.register_post_accumulate_grad_hook(grad_sink.collect)
        self._expect_all()

    def view(self, param: ShardedParameter) -> torch.Tensor:
        """The sum for ``param``, of its shape; always the same memory. Not from ``gradients`` on.

        After :meth:`finish` only what this rank owns is the sum over all ranks.
        """
        views = (pair for sums in self._sums.values() for pair in sums.views())
        return next(view for held, view in views if held is param)

    def owned(self, bucket: Bucket) -> torch.Tensor:
        """The flat sum of what this rank owns of a bucket; always the same memory."""
        return self._owned[bucket.index]

    def shares(self) -> Iterator[tuple[GlobalTensor, torch.Tensor]]:
        """Sums that this rank counts, flat, by tensor: over all ranks each element once."""
        for bucket in self._table.buckets:
            begin = self._table.owned(bucket).begin
            yield from counted(self._table.share(bucket), self.owned(bucket), begin=begin)

    def zero(self) -> None:
        """Forget the last step's sums: the first gradient of a parameter takes the place of its sum."""
        for sums in self._sums.values():
            sums.forget()
        self._expect_all()

    def launch_when_full(self, chunk: int = 0) -> None:
        """The last backward of model chunk ``chunk`` begins: from now on buckets leave when full."""
        self._last_chunks.add(chunk)

    def launch(self, chunk: int = 0) -> None:
        """A backward of model chunk ``chunk`` is over, and nothing more comes of its micro-batch.

        What it filled in part leaves too; after the chunk's last one its buckets are complete.
        """
        self._send_all()
        if chunk in self._last_chunks:
            for bucket in self._kept:
                if bucket.chunk == chunk:
                    self._sums[bucket.index].missing.clear()
            self._launch_in_order(is_end=False)

    def finish(self) -> None:
        """Sum over all ranks; returns when this rank has the sums that it owns.

        Partial pieces are summed over tp first, then every bucket over its replicas (dp * cp ranks,
        or edp ranks for experts; with hybrid sharding first inside a copy, then across), then tied
        ones over the two stages. In that order both copies of a tied parameter end with equal bits: a
        sum of two numbers has no order, while a sum over dp may have.
        """
        self._send_all()
        self._launch_in_order(is_end=True)
        self._reduce_partial()
        while self._travelling:
            self._land()
        for index in self._without_any:
            self._owned[index].zero_()
        self._sum_copies()
        for bucket in self._order:
            if bucket.is_tied:
                tie = start_all_reduce(self.owned(bucket), self._groups.embedding)
                self._log.track("sum_tied", bucket, tie).wait(self._groups.embedding.timeout_s)

    def _make_sums(self) -> dict[int, GradientSum]:
        """Of the buckets that are whole here, all in one tensor."""
        whole = [b for b in self._table.buckets if b.level < ZeroLevel.GRADIENTS]
        flat = self._zeros(sum(bucket.size for bucket in whole))
        flats = torch.split(flat, [bucket.size for bucket in whole])
        return {b.index: GradientSum(b, part) for b, part in zip(whole, flats, strict=True)}

    def _make_owned(self, bucket: Bucket) -> torch.Tensor:
        part = self._table.owned(bucket)
        if bucket.index in self._sums:
            return self._sums[bucket.index].flat[part.place]
        return self._zeros(part.end - part.begin)

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self._table.dtype, device=self._device)

    def _expect_all(self) -> None:
        self._last_chunks, self._left, self._launched = set(), set(), {}
        self._without_any = {b.index for b in self._table.buckets} - self._sums.keys()

    def _sum_of(self, bucket: Bucket) -> GradientSum:
        """Where gradients of a bucket are added now."""
        if bucket.index not in self._sums:
            return self._filling.get(bucket.index) or self._fill(bucket)
        if bucket.index in self._left:
            raise _late(bucket)
        return self._sums[bucket.index]

    def _complete(self, bucket: Bucket, param: ShardedParameter) -> None:
        """A backward has added all that it has for ``param``."""
        if bucket.index not in self._sums:
            sums = self._filling[bucket.index]
            sums.missing.discard(param)
            if not sums.missing:
                self._send(bucket.index)
        elif bucket.chunk in self._last_chunks:
            self._sums[bucket.index].missing.discard(param)
            self._launch_in_order(is_end=False)

    def _fill(self, bucket: Bucket) -> GradientSum:
        while len(self._travelling) > MOST_TRAVELLING:
            self._land()
        flat = torch.empty(bucket.size, dtype=self._table.dtype, device=self._device)
        sums = self._filling[bucket.index] = GradientSum(bucket, flat)
        sums.forget()
        return sums

    def _send(self, index: int) -> None:
        sums = self._filling.pop(index)
        sums.settle()
        self._leave(sums.bucket, sums.flat)

    def _send_all(self) -> None:
        """All ranks do the same work, so the same buckets are filled in part on each."""
        for index in list(self._filling):
            self._send(index)

    def _land(self) -> None:
        """Wait for the oldest micro-batch's bucket under way, and add this rank's part."""
        bucket, flat, reduction = self._travelling.pop(0)
        reduction.wait(bucket.sharing.inside.timeout_s)
        mine = flat[self._table.owned(bucket).place]
        if bucket.index in self._without_any:
            self._without_any.remove(bucket.index)
            self.owned(bucket).copy_(mine)
        else:
            self.owned(bucket).add_(mine)

    def _launch_in_order(self, *, is_end: bool) -> None:
        """Let buckets leave up to the first that still waits for a gradient, or all."""
        for bucket in self._kept[len(self._left) :]:
            sums = self._sums[bucket.index]
            if sums.missing and not is_end:
                break
            self._left.add(bucket.index)
            sums.settle()
            self._leave(bucket, sums.flat)

    def _leave(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """A partial bucket goes over tp now, and over its replicas when the next bucket leaves.

        So a rank waits for tp where all its peers do, and the replicas see one order.
        """
        self._reduce_partial()
        if bucket.is_partial_over_tp:
            self._summing = _PartialSum(bucket, flat, self._groups.tp, self._log)
        else:
            self._reduce(bucket, flat)

    def _reduce_partial(self) -> None:
        if self._summing is not None:
            self._summing.finish()
            self._reduce(self._summing.bucket, self._summing.flat)
        self._summing = None

    def _reduce(self, bucket: Bucket, flat: torch.Tensor) -> None:
        sharing = bucket.sharing
        if bucket.level == ZeroLevel.NONE:
            pending = start_all_reduce(flat, sharing.whole)
        else:
            pending = start_reduce_scatter_in_place(flat, sharing.inside)
        name = "reduce_experts" if bucket.is_expert else "reduce"
        reduction = self._log.track(name, bucket, pending)
        if bucket.index in self._sums:
            self._launched[bucket.index] = reduction
        else:
            self._travelling.append(_Travelling(bucket, flat, reduction))

    def _sum_copies(self) -> None:
        """Wait for what every rank of a copy has, and sum over copies what they have alike."""
        summing: list[tuple[Group, Waitable]] = []
        for bucket in self._order:
            across = bucket.sharing.across
            if bucket.index in self._launched:
                self._launched[bucket.index].wait(bucket.sharing.whole.timeout_s)
            if bucket.level > ZeroLevel.NONE and across.size > 1:
                pending = start_all_reduce(self.owned(bucket), across)
                summing.append((across, self._log.track("sum_copies", bucket, pending)))
        for across, reduction in summing:
            reduction.wait(across.timeout_s)


class _PartialSum:
    """The partial pieces of a bucket on their way over the tp ranks that hold the same blocks.

    Every rank adds its blocks to zeros of the whole tensors' shapes. So one all-reduce over all tp
    ranks serves blocks that some of them share and blocks that all of them share.
    """

    def __init__(self, bucket: Bucket, flat: torch.Tensor, tp: Group, log: CommLog) -> None:
        self.bucket, self.flat, self._tp = bucket, flat, tp
        parts = list(_partial_parts(bucket, flat))
        sizes = [piece.tensor.num_elements for piece, _ in parts]
        whole = flat.new_zeros(sum(sizes))
        self._places = [
            (mine, tensor.view(piece.tensor.shape)[piece.box.within(piece.tensor.whole)])
            for (piece, mine), tensor in zip(parts, torch.split(whole, sizes), strict=True)
        ]
        for mine, block in self._places:
            block.copy_(mine)
        self._pending = log.track("sum_partial", bucket, start_all_reduce(whole, tp))

    def finish(self) -> None:
        """Wait, and put the sums into the bucket."""
        self._pending.wait(self._tp.timeout_s)
        for mine, block in self._places:
            mine.copy_(block)


def counted(
    part: Range, flat: torch.Tensor, *, begin: int
) -> Iterator[tuple[GlobalTensor, torch.Tensor]]:
    """The primary pieces' elements in ``part``, by tensor, as flat views.

    Args:
        part: Elements of a bucket.
        flat: Values of the bucket from element ``begin`` on.
        begin: See there.
    """
    for extent in part.extents():
        values = flat[extent.within(begin)]
        for piece, box, at in piece_boxes(extent):
            if piece.is_primary:
                yield piece.tensor, values[at : at + box.num_elements]


def _order_of_backward(bucket: Bucket) -> tuple[int, int, int]:
    """As backward completes them: the last chunk first, and in it what is used first last."""
    return -bucket.chunk, -bucket.first_use, bucket.index


def _partial_parts(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """The bucket's partial pieces, each with its view of ``flat``, of its shape."""
    for param, start in bucket.spans:
        values = flat[start : start + param.numel()].view(param.shape)
        for piece in param.spec.pieces:
            if piece.is_partial_over_tp:
                yield piece, values[piece.place]


def _late(bucket: Bucket) -> InternalError:
    names = ", ".join(span.param.spec.name for span in bucket.spans[:4])
    return InternalError(
        Fault(
            fact=f"a gradient came after its bucket had left (bucket {bucket.index}: {names})",
            rule="a bucket leaves in its chunk's last backward, which adds to a parameter once",
            remedy="call launch_when_full before the last backward of the chunk, not earlier",
        )
    )
