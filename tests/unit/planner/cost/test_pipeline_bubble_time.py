"""What is waited for in the order of each schedule, against the order itself, played."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from raymega.planner.cost.pipeline_bubble_time import (
    Passes,
    RankTimes,
    own_paths,
    waiting_paths,
    waiting_s,
)
from raymega.schedule.instructions import Instruction
from raymega.schedule.order import make_sizes
from raymega.schedule.simulate import Durations, simulate
from raymega.schedule.table import make_schedule

ORDERS = (("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("gpipe", 3), ("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2), ("dualpipe_v", 2))  # fmt: skip
RATIOS = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 2.0, 1.0), (1.0, 3.0, 0.2))
"""Forward, and both parts of a backward: equal, as measured, recomputed, nearly all attention."""


@dataclass(frozen=True)
class Uneven:
    """One rank takes longer than the others."""

    usual: Durations
    slow_rank: int
    times: float
    transfer: float = 0.0
    handling: float = 0.0

    def of_task(self, rank: int, task: Instruction) -> float:
        return self.usual.of(task.op) * (self.times if rank == self.slow_rank else 1.0)


def played(name: str, chunks: int, pp: int, num: int, durations) -> float:
    sizes = make_sizes(pp=pp, chunks=chunks, num_micro_batches=num)
    return simulate(make_schedule(name, sizes), durations).time


def closed(name: str, chunks: int, pp: int, num: int, *, passes, slow=None, message_s=0.0) -> float:
    """The whole step; ``slow`` are the rank that takes longer and how many times as long."""
    usual = Passes(*(chunks * each for each in passes))
    ranks = [RankTimes((0, pp - 1), usual)]
    busiest, mean = usual, usual
    if slow:
        busiest = Passes(*(each * slow[1] for each in usual))
        mean = Passes(*(each * (1 + (slow[1] - 1) / pp) for each in usual))
        ranks = [RankTimes((slow[0],), busiest)]
    waits = waiting_s(
        name, chunks=chunks, num_micro_batches=num, ranks=ranks, mean=mean, pp=pp,
        message_s=chunks * message_s,
    )  # fmt: skip
    return num * busiest.total_s + sum(waits)


@pytest.mark.parametrize("pp", [2, 3, 4, 7])
@pytest.mark.parametrize(("name", "chunks"), ORDERS)
def test_equal_ranks_wait_as_played(name, chunks, pp):
    for num in sorted({1, 2, 3, pp - 1, pp, pp + 1, 3 * pp // 2, 2 * pp - 1, 2 * pp, 3 * pp}):
        for passes in RATIOS:
            times = Durations(forward=passes[0], backward=passes[1] + passes[2], weight=passes[2])
            taken = played(name, chunks, pp, num, times)
            expected = closed(name, chunks, pp, num, passes=passes)
            assert expected == pytest.approx(taken, rel=0.01), (num, passes)


@pytest.mark.parametrize("num", [1, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "zb_h2"])
def test_messages_are_those_of_the_longest_path(name, num):
    passes = (1.0, 1.2, 0.8)
    times = Durations(forward=1.0, backward=2.0, weight=0.8, transfer=0.05)
    taken = played(name, 1, 4, num, times)
    assert closed(name, 1, 4, num, passes=passes, message_s=0.05) == pytest.approx(taken, rel=2e-3)


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize(
    ("name", "chunks"), [each for each in ORDERS if each not in (("1f1b", 2), ("gpipe", 3))]
)
def test_others_wait_for_a_slow_rank_as_played(name, chunks, rank):
    for num in (2, 4, 6, 8, 16):
        for passes in RATIOS:
            usual = Durations(forward=passes[0], backward=passes[1] + passes[2], weight=passes[2])
            taken = played(name, chunks, 4, num, Uneven(usual, rank, 1.1))
            expected = closed(name, chunks, 4, num, passes=passes, slow=(rank, 1.1))
            assert expected == pytest.approx(taken, rel=0.05), (num, passes)


@pytest.mark.parametrize("times", [1.02, 1.1, 1.3])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_while_a_slow_rank_waits_for_a_backward_later_ranks_pass_others_on(rank, times):
    for num in (1, 2, 4, 6, 16):
        usual = Durations(forward=1.0, backward=2.0, weight=0.8)
        taken = played("1f1b", 1, 4, num, Uneven(usual, rank, times))
        expected = closed("1f1b", 1, 4, num, passes=(1.0, 1.2, 0.8), slow=(rank, times))
        assert expected == pytest.approx(taken, rel=1e-3), num


def test_a_single_rank_waits_for_nothing():
    for name, chunks in ORDERS:
        sizes = {"pp": 1, "chunks": chunks, "num_micro_batches": 5}
        assert max(path[:3] for path in waiting_paths(name, **sizes)) <= (0, 0, 0)
        assert all(path.forwards <= 0 for path in own_paths(name, pp_rank=0, **sizes))
