"""WeightBuffer: the weights of a rank in flat buckets, all-gathered after each rank updated its part.

A gather starts before the first use, which waits for it. Up to level ``gradients`` it starts right
after the update. So it overlaps with the work between steps and the forward of earlier layers. At
level ``parameters`` it starts one unit of the model ahead of each use, in forward and backward.
Frozen weights that are held as codes (`coded_bucket.py`) are decoded for each use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from raymega.errors import Fault, InternalError
from raymega.parallel.comm.collectives import start_all_gather_in_place, start_all_gather_into
from raymega.parallel.comm.process_groups import Group, alone
from raymega.parallel.comm.trace import CommLog, Waitable
from raymega.parallel.comm.work import Work
from raymega.parallel.core.buckets import Bucket, BucketTable, Range
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.parallel.data_parallel.coded_bucket import CodedBucket
from raymega.parallel.data_parallel.state_tensors import FrozenWeights
from raymega.plan.zero_levels import ZeroLevel


def _keep(_param: ShardedParameter) -> None:
    """Keep the values that the parameter already has."""


def _uncut(_bucket: Bucket) -> Group:
    """Return this rank alone: tensors are whole."""
    return alone(0)


class WeightBuffer:
    """Flat buckets in the compute dtype; the parameters become views of them.

    Up to level ``gradients`` a rank holds all weights. After an update the parts of other ranks are stale
    until :meth:`start_gather` and :meth:`wait_for`. At level ``parameters`` it keeps only its own part,
    and a whole bucket has memory only around its use. What autograd saves of a parameter is a view of that
    memory, which is filled again before backward.

    Args:
        table: Buckets of the rank.
        log: Log of the step, which tracks each gather.
        fill: Function that sets a parameter's initial values, for parameters without memory.
        cut_of: Function that returns the ranks with the other parts of the tensors of a bucket of codes; all ranks
            with a part build the buffer together.
    """

    def __init__(
        self,
        table: BucketTable,
        *,
        log: CommLog | None = None,
        cut_of: Callable[[Bucket], Group] = _uncut,
        fill: Callable[[ShardedParameter], None] = _keep,
    ) -> None:
        self._table, self._log = table, log or CommLog()
        self.after_update: list[Callable[[], None]] = []
        """Functions to call after each update of the weights."""
        self._flats: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []
        self.coded: dict[int, CodedBucket] = {}
        """Buckets of codes by index; their weights have memory around a use alone."""
        # Bucket by bucket, so that at level ``parameters`` only one is whole at a time.
        for bucket in table.buckets:
            flat = _make_flat(bucket, fill)
            own = flat[table.owned(bucket).place]
            if bucket.is_coded:
                coded = CodedBucket(bucket, table.owned(bucket), cut_of(bucket))
                coded.encode(flat)
                self.coded[bucket.index], own = coded, own[:0].clone()
                _drop(flat)
            elif _is_kept_in_part(bucket):
                own = own.clone()
                _drop(flat)
            self._flats.append(flat)
            self._own.append(own)
        self._bucket_of = {
            span.param: bucket.index for bucket in table.buckets for span in bucket.spans
        }
        # gathers: pending ones in order of launch, buckets that are whole, and the modules to come
        self._is_old = False
        self._under_way: dict[int, Waitable] = {}
        self._whole: set[int] = set()
        self._decoded: set[int] = set()
        self._used_by: dict[nn.Module, tuple[int, ...]] = {}
        self._uses: Sequence[nn.Module] = ()
        self._place = 0

    @property
    def has_parts_only(self) -> bool:
        """True where weights must be gathered or decoded for each use, which :meth:`wait_for` announces."""
        return bool(self.coded) or any(map(_is_kept_in_part, self._table.buckets))

    @contextmanager
    def recoding(self, bucket: Bucket) -> Iterator[FrozenWeights]:
        """Yield zeros for the weights that a rank keeps of a bucket of codes, and encode what they are at the end.

        All ranks that share its tensors call it together.
        """
        # what was decoded before is of other codes
        self._free(keep=tuple((self._whole | self._decoded) - {bucket.index}))
        # memory of its own: torch resizes no storage that numpy has seen, as a reader's may
        flat, part = torch.zeros_like(self._flats[bucket.index]), self._table.owned(bucket)
        yield FrozenWeights(part=part, values=flat[part.place])
        self.coded[bucket.index].encode(flat)

    def owned(self, bucket: Bucket) -> torch.Tensor:
        """Return the flat weights that this rank updates or keeps, none of a bucket of codes; always the same memory."""
        return self._own[bucket.index]

    def owned_part(self, part: Range) -> torch.Tensor:
        """Return a range of :meth:`owned`."""
        begin = part.begin - self._table.owned(part.bucket).begin
        return self.owned(part.bucket)[begin : begin + part.end - part.begin]

    def mark_updated(self) -> None:
        """Note that this rank has updated its part, so that its copies of other parts are stale."""
        self._is_old = any(bucket.level > ZeroLevel.NONE for bucket in self._table.buckets)
        self._free(keep=())
        for tell in self.after_update:
            tell()

    def whole(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield the buckets that every rank holds whole, with their flat weights.

        The weights are up to date, and equal on all replicas, only after :meth:`start_gather` and
        :meth:`wait_for_all`.
        """
        for bucket, flat in zip(self._table.buckets, self._flats, strict=True):
            if not (_is_kept_in_part(bucket) or bucket.is_coded):
                yield bucket, flat

    def start_gather(self) -> None:
        """Start to gather the other ranks' parts, in the order of first use; do nothing if none is stale.

        At level ``parameters`` only the first unit is gathered.
        """
        if not self._is_old:
            return
        self._is_old = False
        in_parts = []
        for bucket in sorted(self._table.buckets, key=_order_of_use):
            if _is_kept_in_part(bucket):
                in_parts.append(bucket.index)
            elif bucket.level > ZeroLevel.NONE:
                flat, group = self._flats[bucket.index], bucket.sharing.inside
                pending = start_all_gather_in_place(flat, group)
                self._under_way[bucket.index] = self._log.track(_event_of(bucket), bucket, pending)
        self._gather(in_parts[:1])

    def follow(self, uses: Iterable[nn.Module]) -> None:
        """Set the modules that :meth:`wait_for` will get next, in order, so that it can gather ahead.

        A wrong order costs time and nothing else.
        """
        self._uses, self._place = tuple(uses), 0

    def record(self) -> None:
        """Track the pending gathers in the log of a step that starts to be recorded."""
        for index, gather in self._under_way.items():
            if isinstance(gather, Work):
                bucket = self._table.buckets[index]
                self._under_way[index] = self._log.track(_event_of(bucket), bucket, gather)

    def wait_for(self, module: nn.Module) -> None:
        """Return when the weights of ``module`` are whole; they stay so until the next call but one.

        Raises:
            InternalError: The weights are stale, and no gather was started.
        """
        if self._is_old:
            raise _old()
        if not self._under_way and not self.has_parts_only:
            return
        # level ``parameters``: free other units, gather this one and the next
        used = self._buckets_of(module)
        if self.has_parts_only:
            following = self._following(module, used)
            # of codes one unit at a time is decoded
            ahead = (index for index in following if index not in self._decoded)
            self._free(keep=(*used, *ahead))
            self._gather(used)
            self._gather(following)
        # in order of launch, alike on all ranks
        for index in sorted(self._under_way.keys() & set(used), key=list(self._under_way).index):
            self._wait(index)
        # codes are here now: decode those of this unit alone
        for index in used:
            if index in self.coded and index not in self._decoded:
                _refill(self._flats[index])
                self.coded[index].decode(self._flats[index])
                self._decoded.add(index)

    def wait_for_all(self) -> None:
        """Return when every pending gather is complete."""
        while self._under_way:
            self._wait(next(iter(self._under_way)))

    def _wait(self, index: int) -> None:
        inside = self._table.buckets[index].sharing.inside
        self._under_way.pop(index).wait(inside.timeout_s)

    def _buckets_of(self, module: nn.Module) -> tuple[int, ...]:
        if module not in self._used_by:
            params = (p for p in module.parameters() if isinstance(p, ShardedParameter))
            held = (self._bucket_of[p] for p in params if p in self._bucket_of)
            self._used_by[module] = tuple(dict.fromkeys(held))
        return self._used_by[module]

    def _following(self, module: nn.Module, used: tuple[int, ...]) -> tuple[int, ...]:
        """Return the buckets of the next module to come that needs others than ``used``."""
        # find the module in the announced order; a module that is not there ends the search
        place = self._place
        while place < len(self._uses) and self._uses[place] is not module:
            place += 1
        if place == len(self._uses):
            return ()
        self._place = place
        for other in self._uses[place + 1 :]:
            if not set(buckets := self._buckets_of(other)) <= set(used):
                return buckets
        return ()

    def _gather(self, indices: Iterable[int]) -> None:
        """Start to gather those of the buckets that are kept in part and are not whole yet."""
        for index in indices:
            bucket = self._table.buckets[index]
            if not _is_kept_in_part(bucket) or index in self._whole:
                continue
            if bucket.is_coded:
                pending = self.coded[index].start_fetch()
            else:
                _refill(flat := self._flats[index])
                pending = start_all_gather_into(flat, self._own[index], bucket.sharing.inside)
            self._under_way[index] = self._log.track(_event_of(bucket), bucket, pending)
            self._whole.add(index)

    def _free(self, *, keep: tuple[int, ...]) -> None:
        """Free the memory of whole buckets, except those of ``keep``.

        On a GPU this is safe while kernels on them are queued: the memory belongs to the compute stream, and
        a gather's stream waits for the work that was queued there before.
        """
        for index in self._whole.difference(keep):
            if index in self._under_way:
                self._wait(index)
            if index in self.coded:
                self.coded[index].forget_fetched()
            _drop(self._flats[index])
            self._whole.remove(index)
        for index in self._decoded.difference(keep):
            _drop(self._flats[index])
            self._decoded.remove(index)


def _event_of(bucket: Bucket) -> str:
    return "gather_experts" if bucket.is_expert else "gather"


def _is_kept_in_part(bucket: Bucket) -> bool:
    return bucket.level == ZeroLevel.PARAMETERS


def _order_of_use(bucket: Bucket) -> tuple[int, int]:
    return bucket.chunk, bucket.first_use


def _make_flat(bucket: Bucket, fill: Callable[[ShardedParameter], None]) -> torch.Tensor:
    """Return the bucket's weights end to end, with the parameters as views, filled by ``fill``."""
    first = bucket.spans[0].param
    flat = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
    for param, start in bucket.spans:
        view = flat[start : start + param.numel()].view(param.shape)
        if fill is _keep:
            view.copy_(param.detach())
        param.data = view
        fill(param)
    return flat


def _refill(flat: torch.Tensor) -> None:
    # The storage is resized in place, so that parameters and saved tensors remain views of it.
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def _drop(flat: torch.Tensor) -> None:
    flat.untyped_storage().resize_(0)


def _old() -> InternalError:
    return InternalError(
        Fault(
            fact="weights are used that other ranks have updated since",
            rule="after an update weights must be gathered before they are used",
            remedy="call start_gather before the forward pass",
        )
    )
