"""GradBuffer: sums gradients over micro-batches and then over ranks.

`core/buckets.py` says which part of a sum a rank owns. `train/step.py` divides the loss, so that here
everything is only added. `raymega/optim` reads the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, cast

import torch

from raymega.errors import Fault, InternalError
from raymega.parallel.comm.collectives import start_all_reduce, start_reduce_scatter_in_place
from raymega.parallel.comm.process_groups import Group, Groups
from raymega.parallel.comm.trace import CommLog, Waitable
from raymega.parallel.core.buckets import Bucket, BucketTable, Range, piece_boxes
from raymega.parallel.core.shard_spec import Piece
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.data_parallel.grad_accumulator import GradientSum, GradSink
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.zero_levels import ZeroLevel

MOST_TRAVELLING = 1
"""Buckets of one micro-batch that may be in reduction while the next one fills. Sharded gradients
therefore take the memory of this many buckets and one more, in addition to the owned sums."""


class _Travelling(NamedTuple):
    """A bucket with one micro-batch's gradients, and its pending reduction."""

    bucket: Bucket
    flat: torch.Tensor
    reduction: Waitable


class GradBuffer:
    """Gradient sums in float32 or better, added by layers in place or by a hook from ``param.grad``.

    Up to level ``optimizer`` a bucket sums all micro-batches on its rank. It is reduced in the last
    backward, once its last gradient is there and all buckets before it in the order have been launched. So
    all ranks launch in one order, whenever gradients arrive. From ``gradients`` on a bucket is reduced in
    every backward, as soon as it is full. The rank adds its part of the result to its owned sum and frees
    the rest. A parameter without a gradient counts as zero.
    """

    def __init__(self, table: BucketTable, groups: Groups, *, log: CommLog | None = None) -> None:
        # buckets, and the permanent sums
        self._table, self._groups, self._log = table, groups, log or CommLog()
        self._device = table.device
        self._order = sorted(table.buckets, key=_order_of_backward)
        self._kept = [bucket for bucket in self._order if bucket.level < ZeroLevel.GRADIENTS]
        self._sums = self._make_sums()
        self._owned = [self._make_owned(bucket) for bucket in table.buckets]
        # from level ``gradients`` on: filling, in reduction, and owned parts without any sum yet
        self._filling: dict[int, GradientSum] = {}
        self._travelling: list[_Travelling] = []
        self._without_any: set[int] = set()
        # up to ``optimizer``: chunks in their last backward, launched buckets, the partial one over tp
        self._last_chunks: set[int] = set()
        self._left: set[int] = set()
        self._launched: dict[int, Waitable] = {}
        self._summing: _PartialSum | None = None
        # intake: layers add through grad_sink, autograd's gradients come through the hook
        for bucket in table.buckets:
            grad_sink = GradSink(partial(self._sum_of, bucket), partial(self._complete, bucket))
            for param, _ in bucket.spans:
                if param.requires_grad:
                    param.grad_sink = grad_sink
                    param.register_post_accumulate_grad_hook(_collect)
        self._expect_all()

    def view(self, param: ShardedParameter) -> torch.Tensor:
        """Return the sum for ``param``, of its shape; always the same memory. Not from ``gradients`` on.

        After :meth:`finish` only the elements that this rank owns are summed over all ranks.
        """
        views = (pair for sums in self._sums.values() for pair in sums.views())
        return next(view for held, view in views if held is param)

    def owned(self, bucket: Bucket) -> torch.Tensor:
        """Return the flat sum of this rank's owned part of a bucket; always the same memory."""
        return self._owned[bucket.index]

    def owned_part(self, part: Range) -> torch.Tensor:
        """Return a range of :meth:`owned`."""
        begin = part.begin - self._table.owned(part.bucket).begin
        return self.owned(part.bucket)[begin : begin + part.end - part.begin]

    def shares(self) -> Iterator[tuple[GlobalTensor, torch.Tensor]]:
        """Yield the flat sums that this rank counts, with their tensor; over all ranks each element once."""
        for bucket in self._table.buckets:
            begin = self._table.owned(bucket).begin
            yield from counted(self._table.share(bucket), self.owned(bucket), begin=begin)

    def zero(self) -> None:
        """Start a new step: the first gradient of each parameter overwrites its sum."""
        for sums in self._sums.values():
            sums.forget()
        self._expect_all()

    def launch_when_full(self, chunk: int = 0) -> None:
        """Note that the last backward of model chunk ``chunk`` begins: launch its buckets when full."""
        self._last_chunks.add(chunk)

    def launch(self, chunk: int = 0) -> None:
        """Note that a backward of model chunk ``chunk`` has ended, and launch what it filled in part.

        After the chunk's last backward its buckets are complete, whatever gradients are missing.
        """
        self._send_all()
        if chunk in self._last_chunks:
            for bucket in self._kept:
                if bucket.chunk == chunk:
                    self._sums[bucket.index].missing.clear()
            self._launch_in_order(is_end=False)

    def finish(self) -> None:
        """Complete the sums over all ranks; return when this rank has those that it owns.

        Partial pieces are summed over tp first. Then every bucket is summed over its replicas: dp * cp ranks,
        or edp ranks for experts; with hybrid sharding first inside a copy, then across. Tied buckets are summed
        over the two stages last. In that order both copies of a tied parameter get equal bits: a sum of two
        numbers does not depend on the order, while a sum over dp may.
        """
        # launch what is left
        self._send_all()
        self._launch_in_order(is_end=True)
        self._reduce_partial()
        # level ``gradients`` on: land the last reductions, zero parts that got nothing
        while self._travelling:
            self._land()
        for index in self._without_any:
            self._owned[index].zero_()
        # wait for the others, across the copies of hybrid sharding; then tied buckets
        self._sum_copies()
        for bucket in self._order:
            if bucket.is_tied:
                tie = start_all_reduce(self.owned(bucket), self._groups.embedding)
                self._log.track("sum_tied", bucket, tie).wait(self._groups.embedding.timeout_s)

    def _make_sums(self) -> dict[int, GradientSum]:
        """Return the permanent sums, all in one tensor, of the buckets below level ``gradients``."""
        whole = [b for b in self._table.buckets if b.level < ZeroLevel.GRADIENTS]
        flat = self._zeros(sum(bucket.size for bucket in whole))
        flats = torch.split(flat, [bucket.size for bucket in whole]) if whole else ()
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
        """Return the sum to which gradients of a bucket are added now."""
        # level ``gradients`` on: one sum for each backward
        if bucket.index not in self._sums:
            return self._filling.get(bucket.index) or self._fill(bucket)
        if bucket.index in self._left:
            raise _late(bucket)
        return self._sums[bucket.index]

    def _complete(self, bucket: Bucket, param: ShardedParameter) -> None:
        """Note that a backward has added all terms of ``param``, and launch buckets that are full."""
        if bucket.index not in self._sums:
            sums = self._filling[bucket.index]
            sums.missing.discard(param)
            if not sums.missing:
                self._send(bucket.index)
        elif bucket.chunk in self._last_chunks:
            self._sums[bucket.index].missing.discard(param)
            self._launch_in_order(is_end=False)

    def _fill(self, bucket: Bucket) -> GradientSum:
        # wait for the oldest reduction first, which bounds the memory
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
        """Reduce partly filled buckets; all ranks do the same work, so they are the same on each."""
        for index in list(self._filling):
            self._send(index)

    def _land(self) -> None:
        """Wait for the oldest pending reduction of a micro-batch, and add this rank's part to its sum."""
        bucket, flat, reduction = self._travelling.pop(0)
        reduction.wait(bucket.sharing.inside.timeout_s)
        mine = flat[self._table.owned(bucket).place]
        if bucket.index in self._without_any:
            self._without_any.remove(bucket.index)
            self.owned(bucket).copy_(mine)
        else:
            self.owned(bucket).add_(mine)

    def _launch_in_order(self, *, is_end: bool) -> None:
        """Launch buckets up to the first that lacks a gradient, or all of them at the end."""
        for bucket in self._kept[len(self._left) :]:
            sums = self._sums[bucket.index]
            if sums.missing and not is_end:
                break
            self._left.add(bucket.index)
            sums.settle()
            self._leave(bucket, sums.flat)

    def _leave(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Reduce a bucket over its replicas; one with partial pieces over tp now, over them at the next call.

        So a rank waits for its tp peers at the same point as they do, and the replicas see one order.
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
        """Wait for the launched reductions, and with hybrid sharding all-reduce owned parts across copies."""
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
    """A pending all-reduce over tp of a bucket's partial pieces.

    Every rank writes its blocks into zeros of the whole tensors' shapes. So one all-reduce over all tp
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
        """Wait for the sums, and copy them into the bucket."""
        self._pending.wait(self._tp.timeout_s)
        for mine, block in self._places:
            mine.copy_(block)


def counted(
    part: Range, flat: torch.Tensor, *, begin: int
) -> Iterator[tuple[GlobalTensor, torch.Tensor]]:
    """Yield flat views of the primary pieces' elements in ``part``, with their tensor.

    Args:
        part: Range of a bucket's elements.
        flat: Values of the bucket from element ``begin`` on.
        begin: Index in the bucket of the first value of ``flat``.
    """
    for extent in part.extents():
        values = flat[extent.within(begin)]
        for piece, box, at in piece_boxes(extent):
            if piece.is_primary:
                yield piece.tensor, values[at : at + box.num_elements]


def _order_of_backward(bucket: Bucket) -> tuple[int, int, int]:
    """Return the sort key of backward's order: the last chunk first, in it the first used last."""
    return -bucket.chunk, -bucket.first_use, bucket.index


def _partial_parts(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield the bucket's partial pieces, each with its view of ``flat`` in its shape."""
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


def _collect(param: torch.Tensor) -> None:
    """Hand on what autograd has added up.

    Python's collector does not look into autograd's hooks. So a hook that held the sink, and by it the parameters,
    would keep weights and sums of every attempt of the process.
    """
    grad_sink = cast(ShardedParameter, param).grad_sink
    assert grad_sink is not None, "the hook is registered with the sink"
    grad_sink.collect(param)
