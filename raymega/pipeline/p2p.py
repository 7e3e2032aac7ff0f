"""Transfers between a pipeline stage and its two neighbours: activations down, gradients up.

It owns the buffers and the sends under way; in which order transfers happen is the schedule's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raymega.errors import CommunicationError, Fault, InternalError
from raymega.parallel.comm import Pending, irecv, isend
from raymega.parallel.groups import Group, Groups


@dataclass(frozen=True, kw_only=True, slots=True)
class _Route:
    """One direction of travel; ``step`` leads from a stage to the one it sends to."""

    cargo: str
    group: Group
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Send:
    """A send under way, and the tensor that must live until it is done."""

    pending: Pending
    tensor: Tensor
    route: _Route
    micro_batch: int


class PointToPoint:
    """What one stage sends and receives; every tensor has one shape, [S/sp, B, D], and one dtype.

    A send is posted and never waited for where it happens: over gloo it lasts until the receiver
    asks for it, so two neighbours that both waited for a send would wait for ever, as in 1F1B's
    steady phase. Sends are waited for once, by :meth:`wait_all` at the end of the step.

    Each direction has its own communicator, because NCCL carries out the transfers of one in the
    order in which they were posted: on a shared one, neighbours that both post a send before a
    receive would block each other on the GPU. For the same reason nothing is posted ahead of its
    instruction. On a GPU waiting for a receive orders the stream and leaves the host free.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.dtype, self.device = dtype, device
        self._shape, self._timeout_s = shape, timeout_s
        self._down = _Route(cargo="activation", group=groups.pp_forward, step=+1)
        self._up = _Route(cargo="gradient", group=groups.pp_backward, step=-1)
        self._sends: deque[_Send] = deque()

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self._down.group.index

    @property
    def is_last(self) -> bool:
        """Whether no stage comes after this one."""
        return self.stage == self._down.group.size - 1

    def post_send_forward(self, tensor: Tensor, micro_batch: int) -> None:
        """Begin to send an activation [S/sp, B, D] to the next stage; it must not change any more."""
        self._post_send(self._down, tensor, micro_batch)

    def post_send_backward(self, tensor: Tensor, micro_batch: int) -> None:
        """Begin to send a gradient [S/sp, B, D] to the stage before; it must not change any more."""
        self._post_send(self._up, tensor, micro_batch)

    def recv_forward(self, micro_batch: int) -> Tensor:
        """The activation [S/sp, B, D] from the stage before."""
        return self._recv(self._down, micro_batch)

    def recv_backward(self, micro_batch: int) -> Tensor:
        """The gradient [S/sp, B, D] from the next stage."""
        return self._recv(self._up, micro_batch)

    def wait_all(self) -> None:
        """Return when every send is done.

        Raises:
            CommunicationError: A neighbour did not take one in time.
        """
        while self._sends:
            self._finish_send()

    def _post_send(self, route: _Route, tensor: Tensor, micro_batch: int) -> None:
        self._check(route, tensor, micro_batch)
        self._drop_finished_sends()
        tensor = tensor.contiguous()
        peer = self.stage + route.step
        with self._naming("sending", route, micro_batch, peer):
            pending = isend(tensor, route.group, peer, tag=micro_batch)
        self._sends.append(
            _Send(pending=pending, tensor=tensor, route=route, micro_batch=micro_batch)
        )

    def _recv(self, route: _Route, micro_batch: int) -> Tensor:
        buffer = torch.empty(self._shape, dtype=self.dtype, device=self.device)
        peer = self.stage - route.step
        with self._naming("receiving", route, micro_batch, peer):
            irecv(buffer, route.group, peer, tag=micro_batch).wait(self._timeout_s)
        return buffer

    def _drop_finished_sends(self) -> None:
        """Free the tensors of the oldest sends, so that memory does not grow with the step."""
        while self._sends and self._sends[0].pending.is_done():
            self._finish_send()

    def _finish_send(self) -> None:
        send = self._sends.popleft()
        peer = self.stage + send.route.step
        with self._naming("sending", send.route, send.micro_batch, peer):
            send.pending.wait(self._timeout_s)

    @contextmanager
    def _naming(self, verb: str, route: _Route, micro_batch: int, peer: int) -> Iterator[None]:
        """Say in a failure which transfer of which stage it was."""
        try:
            yield
        except CommunicationError as error:
            way = "to" if verb == "sending" else "from"
            where = (
                f"stage {self.stage}, {verb} the {route.cargo} of micro-batch {micro_batch} "
                f"{way} stage {peer}"
            )
            raise CommunicationError(*(_located(fault, where) for fault in error.faults)) from error

    def _check(self, route: _Route, tensor: Tensor, micro_batch: int) -> None:
        """Refuse another shape or dtype here, because gloo ends the receiving process for it."""
        if tensor.shape == self._shape and tensor.dtype == self.dtype:
            return
        raise InternalError(
            Fault(
                fact=f"stage {self.stage}, {route.cargo} of micro-batch {micro_batch}: shape "
                f"{tuple(tensor.shape)}, {tensor.dtype}",
                rule=f"stages exchange tensors of shape {self._shape}, {self.dtype}",
                remedy="correct the stage's output, or the shape given to PointToPoint",
            )
        )


def _located(fault: Fault | str, where: str) -> Fault | str:
    if isinstance(fault, Fault):
        return replace(fault, fact=f"{where}: {fault.fact}")
    return f"{where}: {fault}"
