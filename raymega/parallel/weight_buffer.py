"""WeightBuffer: the weights of a rank in flat buckets, gathered after each rank updated its part.

The gather is started right after the update and waited for by the first use, so it hides behind what
a run does between steps, and behind the forward work of the layers before.
"""

from __future__ import annotations

import torch
from torch import nn

from raymega.errors import Fault, InternalError
from raymega.parallel.buckets import Bucket, BucketTable
from raymega.parallel.comm import Pending, start_all_gather_in_place
from raymega.parallel.comm_log import CommLog, Waitable
from raymega.parallel.parameter import ShardedParameter


class WeightBuffer:
    """Flat buckets in the compute dtype, of which the parameters become views.

    After an update the parts of other ranks are old until :meth:`start_gather` and
    :meth:`wait_for`. Without sharding every rank updates all and nothing is gathered.
    """

    def __init__(self, table: BucketTable, *, log: CommLog | None = None) -> None:
        self._table, self._log = table, log or CommLog()
        self._flats = [_make_flat(bucket) for bucket in table.buckets]
        self._bucket_of = {
            span.param: bucket.index for bucket in table.buckets for span in bucket.spans
        }
        self._is_old = False
        self._under_way: dict[int, Waitable] = {}

    def owned(self, bucket: Bucket) -> torch.Tensor:
        """The flat weights that this rank updates; always the same memory."""
        return self._flats[bucket.index][self._table.owned(bucket).place]

    def mark_updated(self) -> None:
        """This rank has updated what it owns."""
        is_shared = any(bucket.group.size > 1 for bucket in self._table.buckets)
        self._is_old = self._table.is_sharded and is_shared

    def start_gather(self) -> None:
        """Begin to get the other ranks' parts, in the order of first use; nothing if none is old."""
        if not self._is_old:
            return
        for bucket in sorted(self._table.buckets, key=_order_of_use):
            pending = start_all_gather_in_place(self._flats[bucket.index], bucket.group)
            self._under_way[bucket.index] = self._log.track(_event_of(bucket), bucket, pending)
        self._is_old = False

    def record(self) -> None:
        """A step is recorded from now on: gathers that are under way are part of it."""
        for index, gather in self._under_way.items():
            if isinstance(gather, Pending):
                bucket = self._table.buckets[index]
                self._under_way[index] = self._log.track(_event_of(bucket), bucket, gather)

    def wait_for(self, module: nn.Module) -> None:
        """Return when the weights of ``module`` are whole.

        Raises:
            InternalError: They are old, and no gather was started.
        """
        if self._is_old:
            raise _old()
        if not self._under_way:
            return
        used = {self._bucket_of[p] for p in module.parameters() if isinstance(p, ShardedParameter)}
        for index in sorted(used & self._under_way.keys(), key=list(self._under_way).index):
            self._wait_for_bucket(index)

    def wait_for_all(self) -> None:
        """Return when every gather under way is complete."""
        while self._under_way:
            self._wait_for_bucket(next(iter(self._under_way)))

    def _wait_for_bucket(self, index: int) -> None:
        self._under_way.pop(index).wait(self._table.buckets[index].group.timeout_s)


def _event_of(bucket: Bucket) -> str:
    return "gather_experts" if bucket.is_expert else "gather"


def _order_of_use(bucket: Bucket) -> tuple[int, int]:
    return bucket.chunk, bucket.first_use


def _make_flat(bucket: Bucket) -> torch.Tensor:
    """The bucket's weights end to end; the parameters become views of it, their values kept."""
    first = bucket.spans[0].param
    flat = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
    for param, start in bucket.spans:
        view = flat[start : start + param.numel()].view(param.shape)
        view.copy_(param.detach())
        param.data = view
    return flat


def _old() -> InternalError:
    return InternalError(
        Fault(
            fact="weights are used that other ranks have updated since",
            rule="after an update weights must be gathered before they are used",
            remedy="call start_gather before the forward pass",
        )
    )
