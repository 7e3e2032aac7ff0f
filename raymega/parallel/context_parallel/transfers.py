"""Transfers between context-parallel ranks: launched, counted, and tracked in the step's CommLog.

`attention.py` and `ulysses.py` decide which tensors travel, and what is computed meanwhile.
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
    """Start to send ``tensor`` ``by`` places further on the ring, and to receive one of its shape."""
    arriving, pending = start_shift(tensor, ranks, by=by)
    return arriving, log.track_transfer("cp_pass", pending, sent_bytes=tensor.nbytes)


def start_collection(tensor: Tensor, ranks: Group, log: CommLog) -> tuple[Tensor, Waitable]:
    """Start to all-gather the tensors of all n ranks: [N, ...] -> [n N, ...]."""
    whole, pending = start_all_gather(tensor, ranks)
    sent_bytes = tensor.nbytes * (ranks.size - 1)
    return whole, log.track_transfer("cp_gather", pending, sent_bytes=sent_bytes)


def sum_parts(tensor: Tensor, ranks: Group, log: CommLog) -> Tensor:
    """Reduce-scatter [n N, ...] -> [N, ...], this rank's part of the sum; ``tensor`` is overwritten."""
    pending = start_reduce_scatter_in_place(tensor.view(-1), ranks)
    sent_bytes = _all_but_own(tensor, ranks)
    log.track_transfer("cp_reduce", pending, sent_bytes=sent_bytes).wait(ranks.timeout_s)
    return tensor.chunk(ranks.size)[ranks.index]


def exchange(tensor: Tensor, ranks: Group, log: CommLog) -> Tensor:
    """All-to-all of [n N, ...]: the rank at place i gets part i of every rank, in group order."""
    received, pending = start_all_to_all(tensor, ranks)
    sent_bytes = _all_but_own(tensor, ranks)
    log.track_transfer("cp_exchange", pending, sent_bytes=sent_bytes).wait(ranks.timeout_s)
    return received


def _all_but_own(tensor: Tensor, ranks: Group) -> int:
    return tensor.nbytes // ranks.size * (ranks.size - 1)
