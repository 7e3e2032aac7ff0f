"""Lists against another implementation: torch.distributed.pipelining's, where it has the schedule."""

import pytest
from torch.distributed.pipelining import schedules as torchs

from raymega.schedule.instructions import COMPUTE, Op
from raymega.schedule.order import Sizes
from raymega.schedule.table import make_schedule

TORCHS_NAMES = {Op.BACKWARD: "FULL_BACKWARD"}
OPS = {TORCHS_NAMES.get(op, op.name): op for op in COMPUTE}


class _Blank:
    """A schedule that knows its numbers and no process group."""

    def __init__(self, kind, *, pp, chunks, m, microbatches_per_round=0):
        self.kind, self.pp_group_size, self._n_microbatches = kind, pp, m
        self.n_local_stages, self.num_stages = chunks, pp * chunks
        self._num_stages = pp * chunks
        self.number_of_rounds = max(1, m // pp)
        self.microbatches_per_round = m // self.number_of_rounds

    def work(self, rank):
        actions = self.kind._calculate_single_rank_operations(self, rank)
        return [flat for action in actions if action is not None for flat in _flat(action)]


def _flat(action):
    if action.sub_actions is not None:
        return [flat for part in action.sub_actions for flat in _flat(part)]
    return [(OPS[action.computation_type.name], action.stage_index, action.microbatch_index)]


def _ours(name, *, pp, chunks, m):
    program = make_schedule(name, Sizes(pp=pp, num_micro_batches=m, chunks=chunks))
    return [
        [(i.op, program.placement.stage(rank, i.chunk), i.micro_batch) for i in list_ if i.op in COMPUTE]
        for rank, list_ in enumerate(program.lists)
    ]  # fmt: skip


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved(pp, rounds, chunks):
    m = pp * rounds
    blank = _Blank(torchs.ScheduleInterleaved1F1B, pp=pp, chunks=chunks, m=m)
    wanted = [blank.work(rank) for rank in range(pp)]
    assert _ours("interleaved", pp=pp, chunks=chunks, m=m) == wanted


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 7, 16, 21])
def test_zb_v(pp, m):
    blank = _Blank(torchs.ScheduleZBVZeroBubble, pp=pp, chunks=2, m=m)
    assert _ours("zb_v", pp=pp, chunks=2, m=m) == [blank.work(rank) for rank in range(pp)]


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_dualpipe_v(pp, more):
    m = 2 * pp + more
    blank = _Blank(torchs.ScheduleDualPipeV, pp=pp, chunks=2, m=m)
    assert _ours("dualpipe_v", pp=pp, chunks=2, m=m) == [blank.work(rank) for rank in range(pp)]


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3])
def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_chunk(pp, rounds):
    m = pp * rounds
    blank = _Blank(torchs.ScheduleInterleavedZeroBubble, pp=pp, chunks=1, m=m)
    assert _ours("zb_h1", pp=pp, chunks=1, m=m) == [blank.work(rank) for rank in range(pp)]
