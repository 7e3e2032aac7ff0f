"""Communicators are opened before the first step, whoever waits for whom."""

import pytest
import torch

from raymega.parallel.comm import nccl_warmup
from raymega.parallel.comm.collectives import irecv, isend
from raymega.parallel.comm.nccl_warmup import open_communicators, pairs
from raymega.plan.grid import Grid
from raymega.schedule.instructions import COMPUTE
from raymega.schedule.order import Sizes
from raymega.schedule.table import SCHEDULES, make_schedule
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("pp", range(1, 9))
def test_pairs_are_all_that_any_schedule_uses_and_each_once(pp):
    found = list(pairs(pp))
    assert len(set(found)) == len(found)
    used = set()
    for name, kind in SCHEDULES.items():
        sizes = Sizes(pp=pp, num_micro_batches=2, chunks=kind.least_chunks)
        program = make_schedule(name, sizes)
        for rank, schedule in enumerate(program.lists):
            for task in schedule:
                message = program.placement.message(rank, task) if task.op not in COMPUTE else None
                if message and message.sender.rank != message.receiver.rank:
                    used.add(tuple(sorted((message.sender.rank, message.receiver.rank))))
    assert used == set(found)


@pytest.mark.parametrize("pp", range(2, 9))
def test_transfers_that_hold_up_the_host_until_both_came_end_in_three_turns(pp):
    """As NCCL's first ones do: of each rank only the next pair can be met."""
    waiting = {rank: [pair for pair in pairs(pp) if rank in pair] for rank in range(pp)}
    turns = 0
    while any(waiting.values()):
        met = {
            pair
            for pending in waiting.values()
            for pair in pending[:1]
            if all(waiting[rank][0] == pair for rank in pair)
        }
        assert met, f"ranks wait for each other: {waiting}"
        for pending in waiting.values():
            pending[:] = [pair for pair in pending if pair not in met]
        turns += 1
    assert turns <= 3


def _open(env):
    """Opens everything, noting what was used, and then a message goes each way as ever."""
    used = []

    def noting(transfer):
        def note(tensor, group, peer, tag):
            used.append((group.name, group.index, peer))
            return transfer(tensor, group, peer, tag)

        return note

    nccl_warmup.isend, nccl_warmup.irecv = noting(isend), noting(irecv)
    open_communicators(env.groups, torch.device("cpu"))
    group, mine = env.groups.pp_forward, torch.full((1,), float(env.rank))
    if group.index == 0:
        isend(mine, group, 1, tag=0).wait(group.timeout_s)
    elif group.index == 1:
        irecv(mine, group, 0, tag=0).wait(group.timeout_s)
    return used, float(mine)


@pytest.mark.parametrize("grid", [Grid(pp=4), Grid(tp=2, pp=3), Grid(dp=2, pp=2)], ids=str)
def test_every_pair_is_used_in_both_groups_and_transfers_are_right_after_it(grid):
    for rank, (used, value) in enumerate(run_grid(_open, grid)):
        place = grid.coords(rank).pp
        mine = [pair for pair in pairs(grid.pp) if place in pair]
        wanted = {
            (name, place, sum(pair) - place)
            for pair in mine
            for name in ("pp_forward", "pp_backward")
        }
        assert set(used) == wanted and len(used) == len(wanted)
        if place == 1:
            assert value == min(r for r in grid.group("pp", rank))
