"""Executes one rank's schedule for one step; no other code runs a pipeline.

It executes any legal list, for training or for evaluation, with one stage or many. The order is
decided in `raymega.schedule`. Losses are divided and gradients reduced in `raymega.train.step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from raymega.errors import Fault, InternalError
from raymega.parallel.core.weight_grads import DeferredGrad, WeightGradQueue, run_deferred
from raymega.parallel.expert_parallel.overlap import PassInterleaver
from raymega.parallel.workarounds.autograd_engine import add_gradients
from raymega.pipeline.p2p import PointToPoint
from raymega.pipeline.pass_timer import PassTimer
from raymega.schedule.instructions import (
    COMPUTE,
    FREES_ACTIVATIONS,
    TAKES_GRADIENT,
    Instruction,
    Op,
    Schedule,
)
from raymega.schedule.posting import Posts
from raymega.schedule.timeline import Event
from raymega.schedule.transfers import rounds

MicroBatch = TypeVar("MicroBatch")

StageFunction = Callable[[MicroBatch, Tensor | None], Tensor]
Key = tuple[int, int]
"""Number of a micro-batch, and the chunk."""
BACKWARDS = FREES_ACTIVATIONS | TAKES_GRADIENT


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """Output of a step, apart from gradients.

    Attributes:
        loss_sum: Sum of losses over micro-batches, a scalar in max(fp32, dtype); 0 on ranks without
            the last stage.
        events: Recorded events, one per instruction, in seconds since ``began_s``; empty when not
            recorded.
        began_s: Reading of the clock at the start of the step, in seconds.
    """

    loss_sum: Tensor
    events: tuple[Event, ...]
    began_s: float


class Executor(Generic[MicroBatch]):
    """Executor of ``schedule`` on one rank.

    Args:
        schedule: Instruction list of this rank.
        stage_fns: Forward function of each chunk's stage. It takes a micro-batch and the activation
            [S/sp, B, D] of the previous stage, None on the first stage. It returns the activation
            for the next stage, or on the last stage the sum of losses, a scalar.
        p2p: Point-to-point transfers of this rank.
        posts: Receives to post before each round of the schedule, from `raymega.schedule.posting`;
            empty to post each where it is needed.
        deferrals: Queue of each chunk for the weight gradients that its layers defer or hold back;
            needed by schedules that split backwards, and where layers overlap messages and products.
        interleaver: Runs a forward together with the following backward where the schedule allows
            it, see `raymega.schedule.transfers`; None runs one after the other.
        progress: Callback after each instruction, for the detection of hangs.
        passes: Timer of passes on the device; None measures none.
        clock: Monotonic clock of the host, in seconds. GPU work is only queued here, so on a GPU
            recorded events show when instructions were issued; CUDA events would be needed to show
            when they ran.
    """

    def __init__(  # noqa: PLR0913  # raymega.train.build is the only caller
        self,
        schedule: Schedule,
        stage_fns: Sequence[StageFunction[MicroBatch]],
        p2p: PointToPoint,
        *,
        posts: Posts = (),
        deferrals: Sequence[WeightGradQueue] = (),
        interleaver: PassInterleaver | None = None,
        progress: Callable[[], None] = lambda: None,
        passes: PassTimer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._progress, self._pass_timer = progress, passes or PassTimer(None)
        self._schedule, self._stage_fns, self._p2p, self._clock = schedule, stage_fns, p2p, clock
        self._deferrals, self._interleaver = deferrals, interleaver
        self._num_micro_batches = len({instruction.micro_batch for instruction in schedule})
        # An evaluation's list has no backward.
        self._is_training = any(task.op in FREES_ACTIVATIONS for task in schedule)
        # Facts about each instruction are the same in every step: computed once.
        planned = iter(_plan(schedule))
        self._rounds = [
            tuple(next(planned) for _ in tasks)
            for tasks in rounds(schedule, is_paired=interleaver is not None)
        ]
        self._posts = posts or ((),) * len(self._rounds)

    @property
    def passes(self) -> Iterator[tuple[int, bool]]:
        """Passes through the stages' layers, in order: the chunk, and True for a backward."""
        for task in self._schedule:
            if task.op is Op.FORWARD or task.op in TAKES_GRADIENT:
                yield task.chunk, task.op is not Op.FORWARD

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        is_recording: bool,
        lengths: Sequence[int] = (),
        loss_gradient: float = 1.0,
        before_last_backward: Callable[[int], None] = lambda _chunk: None,
        after_backward: Callable[[int], None] = lambda _chunk: None,
    ) -> StepOutput:
        """Execute the schedule; in training, gradients accumulate in the parameters' ``grad``.

        Args:
            micro_batches: Micro-batches of the step, as many as the schedule was made for.
            is_recording: True to return the events of the step.
            lengths: Length S/sp of each micro-batch's activations if they differ; every rank knows
                them from the micro-batches. Empty: the length in the shape of ``p2p``.
            loss_gradient: Gradient of the loss from which backward starts: a factor on every
                gradient.
            before_last_backward: Callback with the number of a model chunk, before the backward or
                weight part that completes the chunk's gradients.
            after_backward: Callback with the chunk's number after every backward or part of one.

        Raises:
            CommunicationError: A transfer failed; the message has stage, micro-batch and peer.
        """
        # fresh state of this step
        self._check(micro_batches)
        of_each: Sequence[int | None] = lengths or [None] * len(micro_batches)
        step = _Step(
            self._stage_fns,
            micro_batches,
            self._p2p,
            self._deferrals,
            lengths=of_each,
            loss_gradient=loss_gradient,
        )
        events = []
        began = self._clock()
        with torch.set_grad_enabled(self._is_training):
            # Execute one task, or a pair of passes, at a time.
            for receives, together in zip(self._posts, self._rounds, strict=True):
                for receive in receives:
                    self._p2p.post_receive(receive, length=of_each[receive.micro_batch])
                start = self._clock()
                for planned in together:
                    if planned.is_last_backward:
                        before_last_backward(planned.task.chunk)
                # Two passes take turns; `change` divides their time between their two events.
                change = start + self._carry_out_all(together, step)
                for planned in together:
                    if planned.is_backward:
                        after_backward(planned.task.chunk)
                if is_recording:
                    times = (start, *[change] * (len(together) - 1), self._clock())
                    events += [
                        _event(planned.task, a - began, b - began)
                        for planned, (a, b) in zip(together, pairwise(times), strict=True)
                    ]
                self._progress()
            # Sends are waited for only here, see PointToPoint.
            self._p2p.wait_all()
        return StepOutput(loss_sum=step.loss_sum, events=tuple(events), began_s=began)

    def _carry_out_all(self, together: tuple[_Planned, ...], step: _Step[MicroBatch]) -> float:
        """Execute one task, or two that take turns; return the seconds of the first of two."""
        if self._interleaver is None or len(together) == 1:
            is_pass = together[0].task.op in COMPUTE
            with self._pass_timer.measured() if is_pass else nullcontext():
                self._carry_out(together[0], step)
            return 0.0
        first, second = (partial(self._carry_out, planned, step) for planned in together)
        with self._pass_timer.measured():
            return self._interleaver.together(first, second)

    def _carry_out(self, planned: _Planned, step: _Step[MicroBatch]) -> None:
        task = planned.task
        if self._deferrals:
            # A whole backward computes weight gradients at once; a split one defers them to its weight part.
            self._deferrals[task.chunk].stays_closed = not planned.is_cut
        try:
            planned.act(step, task)
        except Exception as error:
            error.add_note(f"on pipeline stage {self._p2p.stage(task.chunk)}, at {task}")
            raise
        if planned.is_last:
            # Free early: a rank's peak memory is its micro-batches in flight.
            step.forget(task)

    def _check(self, micro_batches: Sequence[MicroBatch]) -> None:
        if len(micro_batches) != self._num_micro_batches:
            raise InternalError(
                Fault(
                    fact=f"{len(micro_batches)} micro-batches",
                    rule=f"the schedule was made for {self._num_micro_batches}",
                    remedy="make the schedule for as many as the loader returns",
                )
            )


def _event(instruction: Instruction, start_s: float, end_s: float) -> Event:
    return Event(instruction.op.value, instruction.micro_batch, instruction.chunk, start_s, end_s)


class _Step(Generic[MicroBatch]):
    """Tensors of the micro-batches in flight, and the operations on them."""

    def __init__(
        self,
        stage_fns: Sequence[StageFunction[MicroBatch]],
        micro_batches: Sequence[MicroBatch],
        p2p: PointToPoint,
        deferrals: Sequence[WeightGradQueue],
        *,
        lengths: Sequence[int | None],
        loss_gradient: float,
    ) -> None:
        self._stage_fns, self._micro_batches, self._p2p = stage_fns, micro_batches, p2p
        self._deferrals, self._lengths, self._loss_gradient = deferrals, lengths, loss_gradient
        self._inputs: dict[Key, Tensor] = {}
        self._outputs: dict[Key, Tensor] = {}
        self._edges: dict[Key, GradientEdge] = {}
        self._gradients: dict[Key, Tensor] = {}
        self._owed: dict[Key, list[DeferredGrad]] = {}
        # A sum of losses in bfloat16 would lose most micro-batches' digits.
        wide = torch.promote_types(p2p.dtype, torch.float32)
        self.loss_sum = torch.zeros((), dtype=wide, device=p2p.device)

    def forget(self, task: Instruction) -> None:
        """Release the remaining tensors of a micro-batch on a chunk."""
        key = _key(task)
        for held in (self._inputs, self._outputs, self._edges, self._gradients):
            held.pop(key, None)

    def recv_forward(self, task: Instruction) -> None:
        received = self._p2p.recv(task, length=self._lengths[task.micro_batch])
        self._inputs[_key(task)] = received.requires_grad_(torch.is_grad_enabled())

    def forward(self, task: Instruction) -> None:
        stage_fn, micro_batch = self._stage_fns[task.chunk], self._micro_batches[task.micro_batch]
        output = stage_fn(micro_batch, self._inputs.get(_key(task)))
        self._outputs[_key(task)] = output
        if self._p2p.is_last(task.chunk):
            self.loss_sum += output.detach()

    def send_forward(self, task: Instruction) -> None:
        output = self._outputs.pop(_key(task))
        # The autograd edge suffices for backward, so the output is freed once it is sent.
        if output.requires_grad:
            self._edges[_key(task)] = get_gradient_edge(output)
        self._p2p.post_send(output.detach(), task, length=self._lengths[task.micro_batch])

    def recv_backward(self, task: Instruction) -> None:
        self._gradients[_key(task)] = self._p2p.recv(task, length=self._lengths[task.micro_batch])

    def backward(self, task: Instruction) -> None:
        """Run backward from the loss, or from the graph edge of an output already freed."""
        if self._p2p.is_last(task.chunk):
            loss = self._outputs.pop(_key(task))
            add_gradients(loss, torch.full_like(loss, self._loss_gradient))
        else:
            add_gradients(self._edges.pop(_key(task)), self._gradients.pop(_key(task)))
        if self._deferrals:
            self._deferrals[task.chunk].run_held()

    def backward_input(self, task: Instruction) -> None:
        # Layers queue their weight gradients instead of computing them.
        with self._deferrals[task.chunk].collecting() as owed:
            self.backward(task)
        self._owed[_key(task)] = owed

    def backward_weight(self, task: Instruction) -> None:
        run_deferred(self._owed.pop(_key(task)))

    def send_backward(self, task: Instruction) -> None:
        # Backward left the input's gradient in the leaf tensor of recv_forward.
        gradient = self._inputs.pop(_key(task)).grad
        assert gradient is not None, "a stage's output must depend on its input"
        self._p2p.post_send(gradient, task, length=self._lengths[task.micro_batch])


def _key(task: Instruction) -> Key:
    return task.micro_batch, task.chunk


class _Planned(NamedTuple):
    """An instruction with facts from its position in the list.

    Attributes:
        task: Instruction to execute.
        act: Method of `_Step` that executes it.
        is_backward: True for a backward or a part of one.
        is_last_backward: True if it completes the gradients of its chunk.
        is_last: True for the last instruction of its micro-batch on its chunk.
        is_cut: True if the micro-batch's backward on its chunk is split in two parts.
    """

    task: Instruction
    act: Callable[[_Step[Any], Instruction], None]
    is_backward: bool
    is_last_backward: bool
    is_last: bool
    is_cut: bool


ACTIONS: dict[Op, Callable[[_Step[Any], Instruction], None]] = {
    Op.RECV_FORWARD: _Step.recv_forward,
    Op.FORWARD: _Step.forward,
    Op.SEND_FORWARD: _Step.send_forward,
    Op.RECV_BACKWARD: _Step.recv_backward,
    Op.BACKWARD: _Step.backward,
    Op.BACKWARD_INPUT: _Step.backward_input,
    Op.BACKWARD_WEIGHT: _Step.backward_weight,
    Op.SEND_BACKWARD: _Step.send_backward,
}


def _plan(schedule: Schedule) -> tuple[_Planned, ...]:
    """Compute once the facts about each instruction that are the same in every step."""
    # Later instructions overwrite earlier ones, so each entry is the last of its key.
    last = {_key(task): task for task in schedule}
    last_backwards = {task.chunk: task for task in schedule if task.op in FREES_ACTIVATIONS}
    cut = {_key(task) for task in schedule if task.op is Op.BACKWARD_INPUT}
    return tuple(
        _Planned(
            task=task,
            act=ACTIONS[task.op],
            is_backward=task.op in BACKWARDS,
            is_last_backward=task is last_backwards.get(task.chunk),
            is_last=task is last[_key(task)],
            is_cut=_key(task) in cut,
        )
        for task in schedule
    )
