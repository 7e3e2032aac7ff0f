"""Asynchronous transfers of rows between the ranks that hold experts.

`start_row_*` starts one and `wait_for` waits for it; both are autograd functions. In backward the roles
change: the gradient's transfer starts where forward waited, and backward waits where forward started.
Work between the two in forward has its backward between them too, because autograd runs nodes in
reverse order of creation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from raymega.parallel.comm.collectives import (
    start_all_gather,
    start_exchange,
    start_reduce_scatter,
)
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.comm.trace import CommLog, Waitable
from raymega.parallel.comm.work import Work
from raymega.parallel.core.linear_map import Map, apply_linear
from raymega.parallel.expert_parallel.overlap import InterleavedWork, PassInterleaver

Start = Callable[[Tensor], tuple[Tensor, Waitable]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """Numbers of rows that an exchange sends and receives.

    Attributes:
        sent: Rows to each rank of ep.
        received: Rows from each rank of ep.
        of_etp: Rows that each rank of etp received in all.
    """

    sent: Sequence[int]
    received: Sequence[int]
    of_etp: Sequence[int]

    @property
    def reversed(self) -> RowCounts:
        """Counts of the way back."""
        return RowCounts(sent=self.received, received=self.sent, of_etp=self.of_etp)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferStream:
    """Transfers of rows over one group, tracked and interleaved.

    Attributes:
        group: Ranks that exchange rows.
        name: First part of the transfers' names in the log: ``ep`` or ``etp``.
        log: Log of the step, which tracks the transfers.
        interleaver: Scheduler of two passes that take turns while one waits; None for one pass.
    """

    group: Group
    name: str
    log: CommLog
    interleaver: PassInterleaver | None = None

    def exchange(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], *, what: str = "exchange"
    ) -> tuple[Tensor, Waitable]:
        """Start an uneven all-to-all: [sum of sent, N] -> [sum of received, N]."""
        arriving, pending = start_exchange(rows, self.group, sent=sent, received=received)
        row_bytes = rows.nbytes // max(1, rows.shape[0])
        leaving = (sum(sent) - sent[self.group.index]) * row_bytes
        return arriving, self._under_way(what, pending, leaving)

    def gather(self, rows: Tensor) -> tuple[Tensor, Waitable]:
        """Start an all-gather: [T, N] -> [n T, N]."""
        arriving, pending = start_all_gather(rows, self.group)
        leaving = rows.nbytes * (self.group.size - 1)
        return arriving, self._under_way("gather", pending, leaving)

    def reduce(self, rows: Tensor) -> tuple[Tensor, Waitable]:
        """Start a reduce-scatter: [n T, N] -> [T, N]."""
        arriving, pending = start_reduce_scatter(rows, self.group)
        leaving = rows.nbytes // self.group.size * (self.group.size - 1)
        return arriving, self._under_way("reduce", pending, leaving)

    def _under_way(self, what: str, pending: Work, sent_bytes: int) -> Waitable:
        tracked = self.log.track_transfer(f"{self.name}_{what}", pending, sent_bytes=sent_bytes)
        return tracked if self.interleaver is None else InterleavedWork(self.interleaver, tracked)


class AsyncTransfer:
    """A pending transfer; :func:`wait_for` returns its tensor."""

    __slots__ = ("group", "pending", "returned", "start", "start_gradient", "tensor")

    def __init__(self, group: Group, start: Start, start_gradient: Start) -> None:
        self.group, self.start, self.start_gradient = group, start, start_gradient
        self.tensor: Tensor
        self.pending: Waitable
        self.returned: tuple[Tensor, Waitable] | None = None


def start_row_exchange(
    x: Tensor, transfer_stream: TransferStream, parts: RowCounts
) -> AsyncTransfer:
    """Start an uneven all-to-all, [sum of sent, N] -> [sum of received, N]; backward is the reverse."""
    sent, received = parts.sent, parts.received
    return _launch(
        x,
        transfer_stream,
        lambda rows: transfer_stream.exchange(rows, sent, received),
        lambda rows: transfer_stream.exchange(rows, received, sent),
    )


def start_row_gather(x: Tensor, transfer_stream: TransferStream) -> AsyncTransfer:
    """Start an all-gather of equal parts, [T, N] -> [n T, N]; backward is a reduce-scatter."""
    return _launch(x, transfer_stream, transfer_stream.gather, transfer_stream.reduce)


def start_row_sum(x: Tensor, transfer_stream: TransferStream) -> AsyncTransfer:
    """Start a reduce-scatter, [n T, N] -> [T, N]; backward is an all-gather."""
    return _launch(x, transfer_stream, transfer_stream.reduce, transfer_stream.gather)


def wait_for(transfer: AsyncTransfer) -> Tensor:
    """Wait for the transfer, and return its tensor.

    The transfer drops its references to the tensor: autograd's node of the start holds the transfer, and
    a node that references its own output is never freed.
    """
    arriving = transfer.tensor
    del transfer.tensor
    return arriving if transfer.group.size == 1 else _Land.apply(arriving, transfer)


def gather_parts(x: Tensor, stream: TransferStream, parts: Sequence[int]) -> Tensor:
    """All-gather uneven parts: [parts[own], N] -> [sum of parts, N]; backward is :func:`sum_parts`."""
    return x if stream.group.size == 1 else apply_linear(x, *_gather_and_sum(stream, parts))


def sum_parts(x: Tensor, stream: TransferStream, parts: Sequence[int]) -> Tensor:
    """Reduce-scatter uneven parts: [sum of parts, N] -> [parts[own], N]; backward is a gather."""
    return (
        x if stream.group.size == 1 else apply_linear(x, *reversed(_gather_and_sum(stream, parts)))
    )


def _gather_and_sum(stream: TransferStream, parts: Sequence[int]) -> tuple[Map, Map]:
    return lambda x: _gather(x, stream, parts), lambda x: _sum(x, stream, parts)


def _launch(
    x: Tensor, transfer_stream: TransferStream, start: Start, start_gradient: Start
) -> AsyncTransfer:
    """Return the started transfer; a rank that is alone has its rows already, and needs no autograd node."""
    transfer = AsyncTransfer(transfer_stream.group, start, start_gradient)
    transfer.tensor = x if transfer_stream.group.size == 1 else _Launch.apply(x, transfer)
    return transfer


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: AsyncTransfer) -> Tensor:
        ctx.transfer = transfer
        arriving, transfer.pending = transfer.start(x.contiguous())
        return arriving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient, which the AsyncTransfer carries: autograd would check it against x's shape."""
        gradient, pending = ctx.transfer.returned
        pending.wait(ctx.transfer.group.timeout_s)
        ctx.transfer.returned = None
        return gradient, None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: AsyncTransfer) -> Tensor:
        ctx.transfer = transfer
        transfer.pending.wait(transfer.group.timeout_s)
        del transfer.pending
        # A new tensor for autograd, of the same memory.
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The tensor that is returned here only keeps the graph going; the gradient is in the transfer.
        grad = grad.contiguous()
        ctx.transfer.returned = ctx.transfer.start_gradient(grad)
        return grad, None


def _gather(x: Tensor, transfer_stream: TransferStream, parts: Sequence[int]) -> Tensor:
    group = transfer_stream.group
    # Neither backend gathers uneven parts: every rank gets a copy by an uneven all-to-all.
    copies = x.repeat(group.size, *[1] * (x.dim() - 1))
    rows, pending = transfer_stream.exchange(
        copies, [parts[group.index]] * group.size, parts, what="gather"
    )
    pending.wait(group.timeout_s)
    return rows


def _sum(x: Tensor, transfer_stream: TransferStream, parts: Sequence[int]) -> Tensor:
    group = transfer_stream.group
    own = [parts[group.index]] * group.size
    # Each rank gets all terms of its own part, and sums them in group order.
    terms, pending = transfer_stream.exchange(x.contiguous(), parts, own, what="reduce")
    pending.wait(group.timeout_s)
    return terms.view(group.size, own[0], *x.shape[1:]).sum(0)
