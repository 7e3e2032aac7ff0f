"""What context-parallel ranks send each other, launched, counted and shown to the log of a step.

Which tensors travel, and what is done meanwhile, is context_attention's and head_exchange's.
"""

from __future__ import annotations

from torch import Tensor

from raymega.parallel.comm.collectives import (
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter_in_place,
    start_shift,
)
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.comm.trace import CommLog, Waitable


def start_pass(tensor: Tensor, ranks: Group, log: CommLog, *, by: int) -> tuple[Tensor, Waitable]:
    """Begin to give ``tensor`` to the rank ``by`` places on, around, and to get one of its shape."""
    arriving, pending = start_shift(tensor, ranks, by=by)
    return arriving, log.track_transfer("cp_pass", pending, sent_bytes=tensor.nbytes)


def start_collection(tensor: Tensor, ranks: Group, log: CommLog) -> tuple[Tensor, Waitable]:
    """Begin to collect the tensors of all ranks: [N, ...] -> [n N, ...]."""
    whole, pending = start_all_gather(tensor, ranks)
    sent_bytes = tensor.nbytes * (ranks.size - 1)
    return whole, log.track_transfer("cp_gather", pending, sent_bytes=sent_bytes)


def sum_parts(tensor: Tensor, ranks: Group, log: CommLog) -> Tensor:
    """[n N, ...] -> [N, ...], this rank's part of the sum over ``ranks``; the tensor is then void."""
    pending = start_reduce_scatter_in_place(tensor.view(-1), ranks)
    sent_bytes = _all_but_own(tensor, ranks)
    log.track_transfer("cp_reduce", pending, sent_bytes=sent_bytes).wait(ranks.timeout_s)
    return tensor.chunk(ranks.size)[ranks.index]


def exchange(tensor: Tensor, ranks: Group, log: CommLog) -> Tensor:
    """[n N, ...] -> [n N, ...]: the rank at place i gets everybody's i-th part, in group order."""
    received, pending = start_all_to_all(tensor, ranks)
    sent_bytes = _all_but_own(tensor, ranks)
    log.track_transfer("cp_exchange", pending, sent_bytes=sent_bytes).wait(ranks.timeout_s)
    return received


def _all_but_own(tensor: Tensor, ranks: Group) -> int:
    return tensor.nbytes // ranks.size * (ranks.size - 1)
