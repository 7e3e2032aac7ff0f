"""Transfers of rows between the ranks that hold experts, under way while other work is done.

`launch_*` starts one and `land` waits for it; autograd sees both. In backward the roles change: the
gradient's transfer starts where forward waited, and is waited for where forward started. What was
computed between the two in forward has its backward between them too, because autograd runs what was
made later first.
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
    """How many rows go where.

    Attributes:
        sent: To each rank of ep.
        received: From each of them.
        of_etp: What each rank of etp received in all.
    """

    sent: Sequence[int]
    received: Sequence[int]
    of_etp: Sequence[int]

    @property
    def reversed(self) -> RowCounts:
        """The way back."""
        return RowCounts(sent=self.received, received=self.sent, of_etp=self.of_etp)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferStream:
    """Between which ranks rows travel, and who sees it.

    Attributes:
        group: They.
        name: How names of transfers begin: ``ep`` or ``etp``.
        log: Sees them.
        interleaver: Where two passes take turns, who works while one waits; None where one pass runs.
    """

    group: Group
    name: str
    log: CommLog
    interleaver: PassInterleaver | None = None

    def exchange(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], *, what: str = "exchange"
    ) -> tuple[Tensor, Waitable]:
        """Begin an uneven all-to-all: [sum of sent, N] -> [sum of received, N]."""
        arriving, pending = start_exchange(rows, self.group, sent=sent, received=received)
        row_bytes = rows.nbytes // max(1, rows.shape[0])
        leaving = (sum(sent) - sent[self.group.index]) * row_bytes
        return arriving, self._under_way(what, pending, leaving)

    def gather(self, rows: Tensor) -> tuple[Tensor, Waitable]:
        """Begin an all-gather: [T, N] -> [n T, N]."""
        arriving, pending = start_all_gather(rows, self.group)
        leaving = rows.nbytes * (self.group.size - 1)
        return arriving, self._under_way("gather", pending, leaving)

    def reduce(self, rows: Tensor) -> tuple[Tensor, Waitable]:
        """Begin a reduce-scatter: [n T, N] -> [T, N]."""
        arriving, pending = start_reduce_scatter(rows, self.group)
        leaving = rows.nbytes // self.group.size * (self.group.size - 1)
        return arriving, self._under_way("reduce", pending, leaving)

    def _under_way(self, what: str, pending: Work, sent_bytes: int) -> Waitable:
        tracked = self.log.track_transfer(f"{self.name}_{what}", pending, sent_bytes=sent_bytes)
        return tracked if self.interleaver is None else InterleavedWork(self.interleaver, tracked)


class AsyncTransfer:
    """A transfer under way: its tensor may be read when it has landed."""

    __slots__ = ("group", "pending", "returned", "start", "start_gradient", "tensor")

    def __init__(self, group: Group, start: Start, start_gradient: Start) -> None:
        self.group, self.start, self.start_gradient = group, start, start_gradient
        self.tensor: Tensor
        self.pending: Waitable
        self.returned: tuple[Tensor, Waitable] | None = None


def start_row_exchange(
    x: Tensor, transfer_stream: TransferStream, parts: RowCounts
) -> AsyncTransfer:
    """Uneven all-to-all of rows, [sum of sent, N] -> [sum of received, N]; backward the reverse."""
    sent, received = parts.sent, parts.received
    return _launch(
        x,
        transfer_stream,
        lambda rows: transfer_stream.exchange(rows, sent, received),
        lambda rows: transfer_stream.exchange(rows, received, sent),
    )


def start_row_gather(x: Tensor, transfer_stream: TransferStream) -> AsyncTransfer:
    """All-gather of equal parts, [T, N] -> [n T, N]; backward a reduce-scatter."""
    return _launch(x, transfer_stream, transfer_stream.gather, transfer_stream.reduce)


def start_row_sum(x: Tensor, transfer_stream: TransferStream) -> AsyncTransfer:
    """Reduce-scatter, [n T, N] -> [T, N]; backward an all-gather."""
    return _launch(x, transfer_stream, transfer_stream.reduce, transfer_stream.gather)


def wait_for(transfer: AsyncTransfer) -> Tensor:
    """Wait for it.

    The flight lets go of all that holds its tensor: autograd's node of the start has the flight, and
    a node that reaches its own output is never freed.
    """
    arriving = transfer.tensor
    del transfer.tensor
    return arriving if transfer.group.size == 1 else _Land.apply(arriving, transfer)


def gather_parts(x: Tensor, stream: TransferStream, parts: Sequence[int]) -> Tensor:
    """Uneven all-gather: [parts[own], N] -> [sum of parts, N]; backward :func:`sum_parts`."""
    return x if stream.group.size == 1 else apply_linear(x, *_gather_and_sum(stream, parts))


def sum_parts(x: Tensor, stream: TransferStream, parts: Sequence[int]) -> Tensor:
    """Uneven reduce-scatter: [sum of parts, N] -> [parts[own], N]; backward a gather."""
    return (
        x if stream.group.size == 1 else apply_linear(x, *reversed(_gather_and_sum(stream, parts)))
    )


def _gather_and_sum(stream: TransferStream, parts: Sequence[int]) -> tuple[Map, Map]:
    return lambda x: _gather(x, stream, parts), lambda x: _sum(x, stream, parts)


def _launch(
    x: Tensor, transfer_stream: TransferStream, start: Start, start_gradient: Start
) -> AsyncTransfer:
    """A rank that is alone has its rows already, and autograd nothing to see."""
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
        """The gradient has the other shape, so it comes by the flight and not by autograd."""
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
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        ctx.transfer.returned = ctx.transfer.start_gradient(grad)
        return grad, None


def _gather(x: Tensor, transfer_stream: TransferStream, parts: Sequence[int]) -> Tensor:
    group = transfer_stream.group
    copies = x.repeat(group.size, *[1] * (x.dim() - 1))
    rows, pending = transfer_stream.exchange(
        copies, [parts[group.index]] * group.size, parts, what="gather"
    )
    pending.wait(group.timeout_s)
    return rows


def _sum(x: Tensor, transfer_stream: TransferStream, parts: Sequence[int]) -> Tensor:
    group = transfer_stream.group
    own = [parts[group.index]] * group.size
    terms, pending = transfer_stream.exchange(x.contiguous(), parts, own, what="reduce")
    pending.wait(group.timeout_s)
    return terms.view(group.size, own[0], *x.shape[1:]).sum(0)
