"""Assignment of stages to ranks, and the program of a step that combines it with all lists.

Stages are numbered in layer order, chunks on each rank from 0. It owns this arithmetic and no order
of work. Layers are assigned to stages by `raymega.plan.stages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from raymega.schedule.instructions import Instruction, Op, Schedule


class StageSeat(NamedTuple):
    """Location of a stage: its pipeline rank and its chunk there."""

    rank: int
    chunk: int


class Message(NamedTuple):
    """Message from one stage to its neighbour; ``op`` is the operation that receives it."""

    op: Op
    micro_batch: int
    sender: StageSeat
    receiver: StageSeat


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Assignment of stages to ``pp`` ranks with ``chunks`` stages each.

    In a loop every chunk runs from rank 0 to the last: stage = chunk * pp + rank. In a vee odd
    chunks run back, so rank 0 holds the first and the last stage.
    """

    pp: int
    chunks: int = 1
    is_vee: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.pp * self.chunks

    @property
    def are_ends_together(self) -> bool:
        """True if the first and the last stage are on the same rank."""
        return self.seat(0).rank == self.seat(self.num_stages - 1).rank

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage that ``rank`` holds as ``chunk``."""
        return chunk * self.pp + self._turned(rank, chunk)

    def seat(self, stage: int) -> StageSeat:
        """Return the rank and chunk of a stage: the inverse of :meth:`stage`."""
        chunk, rank = divmod(stage, self.pp)
        return StageSeat(self._turned(rank, chunk), chunk)

    def message(self, rank: int, instruction: Instruction) -> Message | None:
        """Return the message of a send or receive of ``rank``; None without such a neighbour."""
        route = _route(self, rank, instruction.chunk, instruction.op)
        if route is None:
            return None
        op, sender, receiver = route
        return Message(op, instruction.micro_batch, sender, receiver)

    def route(self, rank: int, chunk: int, op: Op) -> tuple[Op, StageSeat, StageSeat] | None:
        """Return what receives a message of ``op``, its sender and its receiver; None without such a neighbour."""
        here = StageSeat(rank, chunk)
        stage = self.stage(*here)
        is_forward = op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        is_send = op in (Op.SEND_FORWARD, Op.SEND_BACKWARD)
        # Activations go up the stages and gradients down; a receive comes from the opposite side.
        other = stage + (1 if is_forward == is_send else -1)
        if not 0 <= other < self.num_stages:
            return None
        there = self.seat(other)
        sender, receiver = (here, there) if is_send else (there, here)
        return (Op.RECV_FORWARD if is_forward else Op.RECV_BACKWARD), sender, receiver

    def _turned(self, rank: int, chunk: int) -> int:
        return self.pp - 1 - rank if self.is_vee and chunk % 2 else rank


@cache
def _route(
    placement: Placement, rank: int, chunk: int, op: Op
) -> tuple[Op, StageSeat, StageSeat] | None:
    # a simulation asks for the same few routes of each micro-batch
    return placement.route(rank, chunk, op)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Instructions for one step: ``lists`` by rank, on the stages of ``placement``."""

    placement: Placement
    lists: tuple[Schedule, ...]
