"""GradBuffer: where gradients are summed, over micro-batches and then over ranks, once a step.

Which part of a sum a rank keeps is buckets'; what the sum is divided by is train.step's; who
updates with it is optim's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from raymega.errors import Fault, InternalError
from raymega.parallel.buckets import Bucket, BucketTable, Range, piece_boxes
from raymega.parallel.comm import start_all_reduce, start_reduce_scatter_in_place
from raymega.parallel.comm_log import CommLog, Waitable
from raymega.parallel.groups import Groups
from raymega.parallel.parameter import ShardedParameter
from raymega.parallel.sharding import Piece
from raymega.plan.tensors import GlobalTensor


class GradBuffer:
    """Flat buckets in float32 or better, with a view for each parameter.

    A hook adds each ``param.grad`` to its view and drops it; a parameter that got none keeps zeros.
    An ordinary bucket leaves for the data-parallel ranks in the last backward, as soon as its last
    gradient is there and all buckets before it have left: so the ranks launch in one order, whatever
    arrived when. The rest leaves in :meth:`finish`.
    """

    def __init__(self, table: BucketTable, groups: Groups, *, log: CommLog | None = None) -> None:
        self._table, self._groups, self._log = table, groups, log or CommLog()
        device = table.buckets[0].spans[0].param.device
        self._flat = torch.zeros(table.num_elements, dtype=table.dtype, device=device)
        self._buckets = torch.split(self._flat, [bucket.size for bucket in table.buckets])
        self._views: dict[ShardedParameter, torch.Tensor] = {}
        self._ordinary = [bucket for bucket in table.buckets if bucket.is_ordinary]
        self._missing: list[set[ShardedParameter]] = []
        self._last_chunks: set[int] = set()
        self._launched: dict[int, Waitable] = {}
        for bucket in table.buckets:
            for span in bucket.spans:
                view = self._buckets[bucket.index][span.start : span.stop].view(span.param.shape)
                self._views[span.param] = view
                if span.param.requires_grad:
                    span.param.register_post_accumulate_grad_hook(self._adder(bucket, view))
        self._expect_all()

    def view(self, param: ShardedParameter) -> torch.Tensor:
        """The sum for ``param``, of its shape; always the same memory.

        After :meth:`finish` only what this rank owns is the sum over all ranks.
        """
        return self._views[param]

    def owned(self, bucket: Bucket) -> torch.Tensor:
        """The flat sum of what this rank owns of a bucket; always the same memory."""
        return self._buckets[bucket.index][self._table.owned(bucket).place]

    def shares(self) -> Iterator[tuple[GlobalTensor, torch.Tensor]]:
        """Sums that this rank counts, flat, by tensor: over all ranks each element once."""
        for bucket in self._table.buckets:
            yield from counted(self._table.share(bucket), self._buckets[bucket.index], begin=0)

    def zero(self) -> None:
        """Forget the last step's sums."""
        self._flat.zero_()
        self._expect_all()

    def launch_when_full(self, chunk: int = 0) -> None:
        """The last backward of model chunk ``chunk`` begins: from now on buckets leave when full."""
        self._last_chunks.add(chunk)

    def launch(self, chunk: int = 0) -> None:
        """The last backward of model chunk ``chunk`` is over: its buckets are complete."""
        for bucket in self._ordinary:
            if bucket.chunk == chunk:
                self._missing[bucket.index].clear()
        self._launch_in_order(is_end=False)

    def finish(self) -> None:
        """Sum over all ranks; returns when this rank has the sums that it owns.

        Partial pieces are summed over tp first, then every bucket over dp, then tied ones over the
        two stages. In that order both copies of a tied parameter end with equal bits: a sum of two
        numbers has no order, while a sum over dp may have.
        """
        self._launch_in_order(is_end=True)
        for bucket in self._table.buckets:
            if bucket.is_partial_over_tp:
                self._sum_over_tp(bucket)
            if not bucket.is_ordinary:
                self._launch(bucket)
        for bucket in self._table.buckets:
            self._launched[bucket.index].wait(self._table.dp.timeout_s)
            if bucket.is_tied:
                tie = start_all_reduce(self.owned(bucket), self._groups.embedding)
                self._log.track("sum_tied", bucket, tie).wait(self._groups.embedding.timeout_s)

    def scale(self, factor: float) -> None:
        """Multiply every sum that this rank owns by ``factor``."""
        for bucket in self._table.buckets:
            self.owned(bucket).mul_(factor)

    def _expect_all(self) -> None:
        self._missing = [
            {span.param for span in bucket.spans if span.param.requires_grad}
            for bucket in self._ordinary
        ]
        self._last_chunks, self._launched = set(), {}

    def _adder(self, bucket: Bucket, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def add_gradient(param: torch.Tensor) -> None:
            if param.grad is None:  # put off: backward came by without one
                return
            if bucket.index in self._launched:
                raise _late(bucket)
            view.add_(param.grad)
            param.grad = None
            if bucket.is_ordinary and bucket.chunk in self._last_chunks:
                self._missing[bucket.index].discard(param)
                self._launch_in_order(is_end=False)

        return add_gradient

    def _launch_in_order(self, *, is_end: bool) -> None:
        """Launch ordinary buckets up to the first that still waits for a gradient, or all."""
        for bucket in self._ordinary[len(self._launched) :]:
            if self._missing[bucket.index] and not is_end:
                break
            self._launch(bucket)

    def _sum_over_tp(self, bucket: Bucket) -> None:
        """Sum the partial pieces of a bucket over the tp ranks that hold the same blocks.

        Every rank adds its blocks to zeros of the whole tensors' shapes. So one all-reduce over all
        tp ranks serves blocks that some of them share and blocks that all of them share.
        """
        parts = list(_partial_parts(bucket, self._buckets[bucket.index]))
        sizes = [piece.tensor.num_elements for piece, _ in parts]
        whole = self._flat.new_zeros(sum(sizes))
        blocks = [
            tensor.view(piece.tensor.shape)[piece.box.within(piece.tensor.whole)]
            for (piece, _), tensor in zip(parts, torch.split(whole, sizes), strict=True)
        ]
        for (_, mine), block in zip(parts, blocks, strict=True):
            block.copy_(mine)
        pending = start_all_reduce(whole, self._groups.tp)
        self._log.track("sum_partial", bucket, pending).wait(self._groups.tp.timeout_s)
        for (_, mine), block in zip(parts, blocks, strict=True):
            mine.copy_(block)

    def _launch(self, bucket: Bucket) -> None:
        start = start_reduce_scatter_in_place if self._table.is_sharded else start_all_reduce
        pending = start(self._buckets[bucket.index], self._table.dp)
        self._launched[bucket.index] = self._log.track("reduce", bucket, pending)


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
