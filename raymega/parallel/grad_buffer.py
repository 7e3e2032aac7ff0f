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
from raymega.parallel.groups import Group, Groups
from raymega.parallel.parameter import ShardedParameter
from raymega.parallel.sharding import Piece
from raymega.plan.tensors import GlobalTensor


class GradBuffer:
    """Flat buckets in float32 or better, with a view for each parameter.

    A hook adds each ``param.grad`` to its view and drops it; a parameter that got none keeps zeros.
    A bucket leaves in the last backward, as soon as its last gradient is there and all buckets that
    should be full before it have left: so the ranks launch in one order, whatever arrived when.
    """

    def __init__(self, table: BucketTable, groups: Groups, *, log: CommLog | None = None) -> None:
        self._table, self._groups, self._log = table, groups, log or CommLog()
        device = table.buckets[0].spans[0].param.device
        self._flat = torch.zeros(table.num_elements, dtype=table.dtype, device=device)
        self._buckets = torch.split(self._flat, [bucket.size for bucket in table.buckets])
        self._order = sorted(table.buckets, key=_order_of_backward)
        self._views: dict[ShardedParameter, torch.Tensor] = {}
        self._untouched: set[torch.Tensor] = set()
        self._missing: dict[int, set[ShardedParameter]] = {}
        self._last_chunks: set[int] = set()
        self._left: set[int] = set()
        self._launched: dict[int, Waitable] = {}
        self._summing: _PartialSum | None = None
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
        """Forget the last step's sums: the first gradient of a parameter takes the place of its sum."""
        for bucket in self._table.buckets:
            self._buckets[bucket.index][bucket.spans[-1].stop :] = 0.0
        self._untouched = set(self._views)
        self._expect_all()

    def launch_when_full(self, chunk: int = 0) -> None:
        """The last backward of model chunk ``chunk`` begins: from now on buckets leave when full."""
        self._last_chunks.add(chunk)

    def launch(self, chunk: int = 0) -> None:
        """The last backward of model chunk ``chunk`` is over: its buckets are complete."""
        for bucket in self._order:
            if bucket.chunk == chunk:
                self._missing[bucket.index].clear()
        self._launch_in_order(is_end=False)

    def finish(self) -> None:
        """Sum over all ranks; returns when this rank has the sums that it owns.

        Partial pieces are summed over tp first, then every bucket over its replicas (dp * cp ranks,
        or edp ranks for experts), then tied ones over the two stages. In that order both copies of a tied parameter end with equal bits: a sum of two
        numbers has no order, while a sum over dp may have.
        """
        self._launch_in_order(is_end=True)
        self._reduce_partial()
        for bucket in self._order:
            self._launched[bucket.index].wait(bucket.group.timeout_s)
            if bucket.is_tied:
                tie = start_all_reduce(self.owned(bucket), self._groups.embedding)
                self._log.track("sum_tied", bucket, tie).wait(self._groups.embedding.timeout_s)

    def scale(self, factor: float) -> None:
        """Multiply every sum that this rank owns by ``factor``."""
        for bucket in self._table.buckets:
            self.owned(bucket).mul_(factor)

    def _expect_all(self) -> None:
        self._missing = {
            bucket.index: {span.param for span in bucket.spans if span.param.requires_grad}
            for bucket in self._order
        }
        self._last_chunks, self._left, self._launched = set(), set(), {}

    def _adder(self, bucket: Bucket, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def add_gradient(param: torch.Tensor) -> None:
            if param.grad is None:  # put off: backward came by without one
                return
            if bucket.index in self._left:
                raise _late(bucket)
            if param in self._untouched:
                self._untouched.remove(param)
                view.copy_(param.grad)
            else:
                view.add_(param.grad)
            param.grad = None
            if bucket.chunk in self._last_chunks:
                self._missing[bucket.index].discard(param)
                self._launch_in_order(is_end=False)

        return add_gradient

    def _launch_in_order(self, *, is_end: bool) -> None:
        """Let buckets leave up to the first that still waits for a gradient, or all."""
        for bucket in self._order[len(self._left) :]:
            if self._missing[bucket.index] and not is_end:
                break
            self._left.add(bucket.index)
            for span in bucket.spans:
                if span.param in self._untouched:
                    self._views[span.param].zero_()
            self._leave(bucket)

    def _leave(self, bucket: Bucket) -> None:
        """A partial bucket goes over tp now, and over its replicas when the next bucket leaves.

        So a rank waits for tp where all its peers do, and the replicas see one order.
        """
        self._reduce_partial()
        if bucket.is_partial_over_tp:
            flat = self._buckets[bucket.index]
            self._summing = _PartialSum(bucket, flat, self._groups.tp, self._log)
        else:
            self._reduce(bucket)

    def _reduce_partial(self) -> None:
        if self._summing is not None:
            self._summing.finish()
            self._reduce(self._summing.bucket)
        self._summing = None

    def _reduce(self, bucket: Bucket) -> None:
        start = start_reduce_scatter_in_place if self._table.is_sharded else start_all_reduce
        pending = start(self._buckets[bucket.index], bucket.group)
        name = "reduce_experts" if bucket.is_expert else "reduce"
        self._launched[bucket.index] = self._log.track(name, bucket, pending)


class _PartialSum:
    """The partial pieces of a bucket on their way over the tp ranks that hold the same blocks.

    Every rank adds its blocks to zeros of the whole tensors' shapes. So one all-reduce over all tp
    ranks serves blocks that some of them share and blocks that all of them share.
    """

    def __init__(self, bucket: Bucket, flat: torch.Tensor, tp: Group, log: CommLog) -> None:
        self.bucket, self._tp = bucket, tp
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
