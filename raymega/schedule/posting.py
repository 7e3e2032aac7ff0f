"""Decides when each receive is posted: early enough to overlap with work, too late to deadlock GPUs.

On a GPU a posted receive is a kernel that spins until its message comes. Meanwhile the host may have to
wait for the whole device: to load a kernel, to free memory, to pin host memory. If the message depends on
work that waits for this, both wait for ever. The same holds for a send without its receive.

So a receive is posted before the first round of its rank that begins after the round which computes its
message has begun, in a simulated step. A rank that waits for all its transfers then waits only for rounds
that began earlier. So no ranks wait for each other, however long their rounds really take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from raymega.schedule.instructions import COMPUTE, RECEIVE, SEND, Instruction, Op
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.stage_placement import Message, Program
from raymega.schedule.transfers import rounds

Posts = tuple[tuple[Instruction, ...], ...]
"""Receives to post before each round of a rank's list, in the order of their sends."""


class _Begin(NamedTuple):
    """Place of a round in the order of the simulated step; of two at one time the data's order decides."""

    time: float
    is_backward: bool
    depth: int


class _Round(NamedTuple):
    """Round of a rank's list; ``begin`` is None for a transfer."""

    tasks: tuple[Instruction, ...]
    begin: _Begin | None


def receive_posts(program: Program, rank: int, *, is_paired: bool = False) -> Posts:
    """Return the receives to post before each round of ``rank``'s list, see :func:`rounds`."""
    by_rank = _rounds_in_time(program, is_paired=is_paired)
    computed = dict(_messages(program, by_rank))
    posts: list[list[Instruction]] = [[] for _ in by_rank[rank]]
    # A peer's messages are posted in the order of their computation, so each search starts at the last one's place.
    reached: defaultdict[int, int] = defaultdict(int)
    for place, (tasks, _) in enumerate(by_rank[rank]):
        message = program.placement.message(rank, tasks[0]) if tasks[0].op in RECEIVE else None
        if message is None or message.sender.rank == rank:
            continue
        at = reached[message.sender.rank]
        while at < place and not _is_after(by_rank[rank][at].begin, computed[message]):
            at += 1
        reached[message.sender.rank] = at
        posts[at].append(tasks[0])
    return tuple(map(tuple, posts))


def _is_after(begin: _Begin | None, other: _Begin) -> bool:
    return begin is not None and begin > other


def _rounds_in_time(program: Program, *, is_paired: bool) -> list[list[_Round]]:
    """Return each rank's rounds with their places in a simulated step."""
    found = []
    for rank, events in enumerate(simulate(program, Durations()).events):
        found.append(list[_Round]())
        num_tasks = 0
        for tasks in rounds(program.lists[rank], is_paired=is_paired):
            begin = None
            if tasks[0].op in COMPUTE:
                is_backward = tasks[0].op is not Op.FORWARD
                stage = program.placement.stage(rank, tasks[0].chunk)
                depth = -stage if is_backward else stage
                begin = _Begin(events[num_tasks].start_s, is_backward, depth)
            found[-1].append(_Round(tasks, begin))
            num_tasks += len(tasks)
    return found


def _messages(program: Program, by_rank: list[list[_Round]]) -> Iterator[tuple[Message, _Begin]]:
    """Yield each message, and the place of the round that computes it."""
    for rank, parts in enumerate(by_rank):
        results: dict[tuple[int, int, bool], _Begin] = {}
        for tasks, begin in parts:
            for task in tasks:
                if begin is not None and task.op is not Op.BACKWARD_WEIGHT:
                    results[task.micro_batch, task.chunk, task.op is Op.FORWARD] = begin
                message = program.placement.message(rank, task) if task.op in SEND else None
                if message is not None:
                    is_forward = task.op is Op.SEND_FORWARD
                    yield message, results[task.micro_batch, task.chunk, is_forward]
