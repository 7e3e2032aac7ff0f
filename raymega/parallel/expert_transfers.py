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

from raymega.parallel.comm import (
    Pending,
    start_all_gather,
    start_exchange,
    start_reduce_scatter,
)
from raymega.parallel.groups import Group

Start = Callable[[Tensor], tuple[Tensor, Pending]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
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
    def reversed(self) -> Parts:
        """The way back."""
        return Parts(sent=self.received, received=self.sent, of_etp=self.of_etp)


class Flight:
    """A transfer under way: its tensor may be read when it has landed."""

    __slots__ = ("group", "pending", "returned", "start", "start_gradient", "tensor")

    def __init__(self, group: Group, start: Start, start_gradient: Start) -> None:
        self.group, self.start, self.start_gradient = group, start, start_gradient
        self.tensor: Tensor
        self.pending: Pending
        self.returned: tuple[Tensor, Pending] | None = None


def launch_exchange(x: Tensor, group: Group, parts: Parts) -> Flight:
    """Uneven all-to-all of rows, [sum of sent, N] -> [sum of received, N]; backward the reverse."""
    sent, received = parts.sent, parts.received
    return _launch(
        x,
        group,
        lambda rows: start_exchange(rows, group, sent=sent, received=received),
        lambda rows: start_exchange(rows, group, sent=received, received=sent),
    )


def launch_gather(x: Tensor, group: Group) -> Flight:
    """All-gather of equal parts, [T, N] -> [n T, N]; backward a reduce-scatter."""
    return _launch(
        x,
        group,
        lambda rows: start_all_gather(rows, group),
        lambda rows: start_reduce_scatter(rows, group),
    )


def launch_sum(x: Tensor, group: Group) -> Flight:
    """Reduce-scatter, [n T, N] -> [T, N]; backward an all-gather."""
    return _launch(
        x,
        group,
        lambda rows: start_reduce_scatter(rows, group),
        lambda rows: start_all_gather(rows, group),
    )


def land(flight: Flight) -> Tensor:
    """Wait for it.

    The flight lets go of all that holds its tensor: autograd's node of the start has the flight, and
    a node that reaches its own output is never freed.
    """
    arriving = flight.tensor
    del flight.tensor
    return _Land.apply(arriving, flight)


def gather_parts(x: Tensor, group: Group, parts: Sequence[int]) -> Tensor:
    """Uneven all-gather: [parts[own], N] -> [sum of parts, N]; backward :func:`sum_parts`."""
    return x if group.size == 1 else _GatherParts.apply(x, group, parts)


def sum_parts(x: Tensor, group: Group, parts: Sequence[int]) -> Tensor:
    """Uneven reduce-scatter: [sum of parts, N] -> [parts[own], N]; backward a gather."""
    return x if group.size == 1 else _SumParts.apply(x, group, parts)


def _launch(x: Tensor, group: Group, start: Start, start_gradient: Start) -> Flight:
    flight = Flight(group, start, start_gradient)
    flight.tensor = _Launch.apply(x, flight)
    return flight


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        arriving, flight.pending = flight.start(x.contiguous())
        return arriving.view_as(arriving) if arriving is x else arriving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        """The gradient has the other shape, so it comes by the flight and not by autograd."""
        gradient, pending = ctx.flight.returned
        pending.wait(ctx.flight.group.timeout_s)
        ctx.flight.returned = None
        return gradient, None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.pending.wait(flight.group.timeout_s)
        del flight.pending
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        ctx.flight.returned = ctx.flight.start_gradient(grad)
        return grad, None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, parts: Sequence[int]) -> Tensor:
        ctx.group, ctx.parts = group, parts
        return _gather(x, group, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum(grad, ctx.group, ctx.parts), None, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, parts: Sequence[int]) -> Tensor:
        ctx.group, ctx.parts = group, parts
        return _sum(x, group, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.group, ctx.parts), None, None


def _gather(x: Tensor, group: Group, parts: Sequence[int]) -> Tensor:
    copies = x.repeat(group.size, *[1] * (x.dim() - 1))
    own = [parts[group.index]] * group.size
    rows, pending = start_exchange(copies, group, sent=own, received=parts)
    pending.wait(group.timeout_s)
    return rows


def _sum(x: Tensor, group: Group, parts: Sequence[int]) -> Tensor:
    own = [parts[group.index]] * group.size
    terms, pending = start_exchange(x.contiguous(), group, sent=parts, received=own)
    pending.wait(group.timeout_s)
    return terms.view(group.size, own[0], *x.shape[1:]).sum(0)
