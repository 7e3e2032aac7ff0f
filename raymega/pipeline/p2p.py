"""Transfers between pipeline stages: activations to the next, gradients to the previous one.

It owns the buffers and the pending sends. The order of transfers is decided in `raymega.schedule`,
the ranks of stages in `raymega.schedule.stage_placement`.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from raymega.errors import CommunicationError, Fault, InternalError
from raymega.parallel.comm.collectives import irecv, isend
from raymega.parallel.comm.process_groups import Group, Groups
from raymega.parallel.comm.work import Work
from raymega.schedule.instructions import Instruction, Op
from raymega.schedule.stage_placement import Message, Placement

CARGO = {Op.RECV_FORWARD: "activation", Op.RECV_BACKWARD: "gradient"}
AHEAD_BYTES = 2**18
"""Largest message, in bytes, whose receive is posted ahead over gloo.

Larger ones are received only when needed: sockets do not buffer them whole, and if the sender dies
with one half sent, gloo reports nothing to the receiver until the timeout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Transfer:
    """A pending send or receive, and the tensor that must live until it is done."""

    pending: Work
    tensor: Tensor
    message: Message


class PointToPoint:
    """Sends and receives of one rank: tensors of one dtype and one shape, [S/sp, B, D].

    A micro-batch may have another length S/sp. Both ends know it from the micro-batch itself; it is
    not sent.

    A send is posted without waiting for it. Over gloo it lasts until the receiver posts its
    receive, so two neighbours that both waited for a send would deadlock, as in 1F1B's steady
    state. Sends are waited for once, by :meth:`wait_all` at the end of the step.

    Messages to higher and to lower ranks have separate communicators, because NCCL executes the
    transfers of one communicator in the order in which they were posted. On a shared one,
    neighbours that both post a send before a receive would block each other on the GPU. For the
    same reason receives are posted in the order in which the peer sends. `raymega.schedule.posting`
    decides when. Large messages over gloo are received where they are needed, see ``AHEAD_BYTES``.

    On a GPU, waiting for a receive orders the stream and does not block the host. A message to
    another chunk of this rank is passed without a copy.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        placement: Placement,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.dtype, self.device = dtype, device
        self._shape, self._timeout_s, self._placement = shape, timeout_s, placement
        self._up_the_ranks, self._down_the_ranks = groups.pp_forward, groups.pp_backward
        self._rank = groups.pp_forward.index
        self._sends: deque[_Transfer] = deque()
        self._own: dict[Message, Tensor] = {}
        self._posted: dict[Message, _Transfer] = {}
        # A cache: every step has the same instructions.
        self._messages: dict[Instruction, Message] = {}

    def stage(self, chunk: int) -> int:
        """Return the stage that this rank holds as ``chunk``."""
        return self._placement.stage(self._rank, chunk)

    def is_last(self, chunk: int) -> bool:
        """Return True if ``chunk`` is the last stage of the pipeline."""
        return self.stage(chunk) == self._placement.num_stages - 1

    def post_send(self, tensor: Tensor, send: Instruction, *, length: int | None = None) -> None:
        """Begin to send a tensor, which must not change until the send is done.

        Args:
            tensor: Activation or gradient [S/sp, B, D] to send.
            send: Send instruction, which names micro-batch and chunk.
            length: Length S/sp of the micro-batch; None for the length in the constructor's shape.

        Raises:
            InternalError: The tensor has another shape or dtype than the receiver expects.
            CommunicationError: The send cannot be posted.
        """
        message = self._message(send)
        self._check(message, tensor, self._shape_of(length))
        # another chunk of this rank: no transfer
        if message.receiver.rank == self._rank:
            self._own[message] = tensor
            return
        self._drop_finished_sends()
        tensor = tensor.contiguous()  # torch.distributed sends contiguous memory only
        try:
            pending = isend(
                tensor, self._group(message), message.receiver.rank, tag=self._tag(message)
            )
        except CommunicationError as error:
            raise self._named(error, "sending", message) from error
        self._sends.append(_Transfer(pending=pending, tensor=tensor, message=message))

    def post_receive(self, receive: Instruction, *, length: int | None = None) -> None:
        """Begin to receive the tensor that :meth:`recv` returns later; see :meth:`post_send`.

        A failure is suppressed here: :meth:`recv` posts the receive again and reports the error.
        """
        message = self._message(receive)
        num_bytes = prod(self._shape_of(length)) * self.dtype.itemsize
        is_too_large = self.device.type == "cpu" and num_bytes > AHEAD_BYTES
        if message.sender.rank == self._rank or is_too_large:
            return
        with suppress(CommunicationError):
            self._posted[message] = self._irecv(message, length)

    def recv(self, receive: Instruction, *, length: int | None = None) -> Tensor:
        """Return the activation or gradient [S/sp, B, D] of ``receive``; see :meth:`post_send`."""
        message = self._message(receive)
        if message.sender.rank == self._rank:
            return self._own.pop(message)
        # posted ahead, or post it now
        transfer = self._posted.pop(message, None) or self._irecv(message, length)
        try:
            transfer.pending.wait(self._timeout_s)
        except CommunicationError as error:
            raise self._named(error, "receiving", message) from error
        return transfer.tensor

    def wait_all(self) -> None:
        """Wait until every send is done.

        Raises:
            CommunicationError: A neighbour did not receive one in time.
        """
        while self._sends:
            self._finish_send()

    def _irecv(self, message: Message, length: int | None) -> _Transfer:
        buffer = torch.empty(self._shape_of(length), dtype=self.dtype, device=self.device)
        try:
            pending = irecv(
                buffer, self._group(message), message.sender.rank, tag=self._tag(message)
            )
        except CommunicationError as error:
            raise self._named(error, "receiving", message) from error
        return _Transfer(pending=pending, tensor=buffer, message=message)

    def _message(self, instruction: Instruction) -> Message:
        message = self._messages.get(instruction)
        if message is None:
            message = self._placement.message(self._rank, instruction)
            assert message is not None, f"stage {self.stage(instruction.chunk)} has no neighbour"
            self._messages[instruction] = message
        return message

    def _shape_of(self, length: int | None) -> tuple[int, ...]:
        return self._shape if length is None else (length, *self._shape[1:])

    def _group(self, message: Message) -> Group:
        is_up = message.receiver.rank > message.sender.rank
        return self._up_the_ranks if is_up else self._down_the_ranks

    def _tag(self, message: Message) -> int:
        """Return a number that is unique among the messages of a step between two ranks."""
        kind = 2 * message.receiver.chunk + (message.op == Op.RECV_BACKWARD)
        return message.micro_batch * 2 * self._placement.chunks + kind

    def _drop_finished_sends(self) -> None:
        """Free the tensors of the oldest finished sends, to bound the memory of a step."""
        # Oldest first: sends to one peer complete in order.
        while self._sends and self._sends[0].pending.is_done():
            self._finish_send()

    def _finish_send(self) -> None:
        send = self._sends.popleft()
        try:
            send.pending.wait(self._timeout_s)
        except CommunicationError as error:
            raise self._named(error, "sending", send.message) from error

    def _named(self, error: CommunicationError, verb: str, message: Message) -> CommunicationError:
        """Return the error with the stage, micro-batch and peer of its transfer in the message."""
        sender = self._placement.stage(*message.sender)
        receiver = self._placement.stage(*message.receiver)
        here, other, way = sender, receiver, "to"
        if verb == "receiving":
            here, other, way = receiver, sender, "from"
        where = (
            f"stage {here}, {verb} the {CARGO[message.op]} of micro-batch "
            f"{message.micro_batch} {way} stage {other}"
        )
        return CommunicationError(*(_located(fault, where) for fault in error.faults))

    def _check(self, message: Message, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Reject another shape or dtype here, because gloo would end the receiving process for it.

        Raises:
            InternalError: The tensor has another shape or dtype.
        """
        if tensor.shape == shape and tensor.dtype == self.dtype:
            return
        stage = self._placement.stage(*message.sender)
        raise InternalError(
            Fault(
                fact=f"stage {stage}, {CARGO[message.op]} of micro-batch {message.micro_batch}: "
                f"shape {tuple(tensor.shape)}, {tensor.dtype}",
                rule=f"stages exchange tensors of shape {shape}, {self.dtype}",
                remedy="correct the stage's output, the shape given to PointToPoint, or the length "
                "that the micro-batch tells",
            )
        )


def _located(fault: Fault | str, where: str) -> Fault | str:
    if isinstance(fault, Fault):
        return replace(fault, fact=f"{where}: {fault.fact}")
    return f"{where}: {fault}"
