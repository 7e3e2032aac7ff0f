"""Carries out one stage's schedule for one step: the only code that runs a pipeline.

It obeys any legal list, for training or for evaluation, with one stage or many. It decides no
order (schedule does), divides no loss and reduces no gradient (train.step does).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from raymega.errors import Fault, InternalError
from raymega.pipeline.p2p import PointToPoint
from raymega.schedule.instructions import Instruction, Op, Schedule
from raymega.schedule.timeline import Event

MicroBatch = TypeVar("MicroBatch")

StageFunction = Callable[[MicroBatch, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What a step left behind, apart from gradients.

    Attributes:
        loss_sum: Scalar in max(fp32, dtype), the sum over micro-batches; 0 but on the last stage.
        events: One an instruction, in seconds since the step's start; empty when not recorded.
    """

    loss_sum: Tensor
    events: tuple[Event, ...]


class Executor(Generic[MicroBatch]):
    """Runs ``schedule`` on one rank.

    Args:
        schedule: The list of this rank's stage.
        stage_fn: The stage's forward: a micro-batch and the activation [S/sp, B, D] from the
            stage before, None on the first, to the activation for the next stage, or on the last stage
            to the sum of losses, a scalar.
        p2p: The stage's transfers.
        clock: Seconds, monotonic. It reads the host's time, so on a GPU, whose work is only queued
            here, recorded events show when instructions were issued; CUDA events are needed there
            for when they ran.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage_fn: StageFunction[MicroBatch],
        p2p: PointToPoint,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._schedule, self._stage_fn, self._p2p, self._clock = schedule, stage_fn, p2p, clock
        self._is_training = any(instruction.op == Op.BACKWARD for instruction in schedule)
        self._last = {instruction.micro_batch: instruction for instruction in schedule}
        backwards = [instruction for instruction in schedule if instruction.op == Op.BACKWARD]
        self._last_backwards = {instruction.chunk: instruction for instruction in backwards}

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        is_recording: bool,
        loss_gradient: float = 1.0,
        before_last_backward: Callable[[int], None] = lambda _chunk: None,
    ) -> StepOutput:
        """Carry out the schedule; in training, gradients add up in the parameters' ``grad``.

        Args:
            micro_batches: One for each that the schedule knows.
            is_recording: Return what was done when.
            loss_gradient: What backward starts from: a factor on every gradient.
            before_last_backward: Called with the number of a model chunk before the backward after
                which its gradients are complete.

        Raises:
            CommunicationError: A transfer failed; names stage, micro-batch and peer.
        """
        self._check(micro_batches)
        step = _Step(self._stage_fn, micro_batches, self._p2p, loss_gradient)
        events = []
        began = self._clock()
        with torch.set_grad_enabled(self._is_training):
            for instruction in self._schedule:
                start = self._clock()
                if instruction is self._last_backwards.get(instruction.chunk):
                    before_last_backward(instruction.chunk)
                self._carry_out(instruction, step)
                if is_recording:
                    events.append(_event(instruction, start - began, self._clock() - began))
            self._p2p.wait_all()
        return StepOutput(loss_sum=step.loss_sum, events=tuple(events))

    def _carry_out(self, instruction: Instruction, step: _Step[MicroBatch]) -> None:
        micro_batch = instruction.micro_batch
        try:
            step.actions[instruction.op](micro_batch)
        except Exception as error:
            error.add_note(f"on pipeline stage {self._p2p.stage}, at {instruction}")
            raise
        if instruction is self._last[micro_batch]:
            step.forget(micro_batch)

    def _check(self, micro_batches: Sequence[MicroBatch]) -> None:
        if len(micro_batches) != len(self._last):
            raise InternalError(
                Fault(
                    fact=f"{len(micro_batches)} micro-batches",
                    rule=f"the schedule was made for {len(self._last)}",
                    remedy="make the schedule for as many as the loader returns",
                )
            )


def _event(instruction: Instruction, start_s: float, end_s: float) -> Event:
    return Event(instruction.op.value, instruction.micro_batch, instruction.chunk, start_s, end_s)


class _Step(Generic[MicroBatch]):
    """The tensors of the micro-batches in flight, and what each operation does to them."""

    def __init__(
        self,
        stage_fn: StageFunction[MicroBatch],
        micro_batches: Sequence[MicroBatch],
        p2p: PointToPoint,
        loss_gradient: float,
    ) -> None:
        self._stage_fn, self._micro_batches, self._p2p = stage_fn, micro_batches, p2p
        self._loss_gradient = loss_gradient
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        wide = torch.promote_types(p2p.dtype, torch.float32)
        self.loss_sum = torch.zeros((), dtype=wide, device=p2p.device)
        self.actions: dict[Op, Callable[[int], None]] = {
            Op.RECV_FORWARD: self._recv_forward,
            Op.FORWARD: self._forward,
            Op.SEND_FORWARD: self._send_forward,
            Op.RECV_BACKWARD: self._recv_backward,
            Op.BACKWARD: self._backward,
            Op.SEND_BACKWARD: self._send_backward,
        }

    def forget(self, micro_batch: int) -> None:
        """Let go of what is left of a micro-batch."""
        for tensors in (self._inputs, self._outputs, self._gradients):
            tensors.pop(micro_batch, None)

    def _recv_forward(self, micro_batch: int) -> None:
        received = self._p2p.recv_forward(micro_batch)
        self._inputs[micro_batch] = received.requires_grad_(torch.is_grad_enabled())

    def _forward(self, micro_batch: int) -> None:
        output = self._stage_fn(self._micro_batches[micro_batch], self._inputs.get(micro_batch))
        self._outputs[micro_batch] = output
        if self._p2p.is_last:
            self.loss_sum += output.detach()

    def _send_forward(self, micro_batch: int) -> None:
        self._p2p.post_send_forward(self._outputs[micro_batch].detach(), micro_batch)

    def _recv_backward(self, micro_batch: int) -> None:
        self._gradients[micro_batch] = self._p2p.recv_backward(micro_batch)

    def _backward(self, micro_batch: int) -> None:
        output = self._outputs.pop(micro_batch)
        if self._p2p.is_last:
            gradient = torch.full_like(output, self._loss_gradient)
        else:
            gradient = self._gradients.pop(micro_batch)
        torch.autograd.backward(output, gradient)

    def _send_backward(self, micro_batch: int) -> None:
        gradient = self._inputs.pop(micro_batch).grad
        assert gradient is not None, "a stage's output must depend on its input"
        self._p2p.post_send_backward(gradient, micro_batch)
