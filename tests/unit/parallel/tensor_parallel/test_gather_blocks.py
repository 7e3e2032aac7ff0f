"""A block's positions are those that its own gather brings: a product never reads what is still under way."""

from types import SimpleNamespace

import pytest
import torch

from raymega.parallel.tensor_parallel import overlap
from raymega.plan.hardware.tp_overlap import num_blocks

PER_RANK = 3


class _Gather:
    """Work that brings the rows of one block when it is waited for, and not before."""

    def __init__(self, whole, rows):
        self.whole, self.rows = whole, rows

    def wait(self, timeout_s):
        self.whole[self.rows] = torch.arange(self.rows.start, self.rows.stop).view(-1, 1, 1)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_each_block_is_whole_after_its_own_wait(size, monkeypatch):
    def bring(part, whole, group, *, num_blocks):
        # the contract of start_block_gathers: operation i brings the block i further on the ring than this rank's own
        length, own = len(whole) // num_blocks, group.index // (group.size // num_blocks)
        firsts = ((own + ahead) % num_blocks * length for ahead in range(num_blocks))
        return [_Gather(whole, slice(first, first + length)) for first in firsts]

    monkeypatch.setattr(overlap, "start_block_gathers", bring)
    for index in range(size):
        tp = SimpleNamespace(size=size, index=index, timeout_s=1.0)
        x = torch.zeros(PER_RANK, 1, 1)
        whole, blocks = overlap.start_gather_blocks(x, SimpleNamespace(tp=tp, degree=size))
        whole.fill_(-1)
        positions = torch.arange(size * PER_RANK)
        assert len(blocks) == num_blocks(size)
        # this rank's own block comes first
        of_block, rows = positions.chunk(len(blocks)), whole.chunk(len(blocks))
        assert index * PER_RANK in of_block[blocks[0].number]
        for block in blocks:
            assert (rows[block.number] == -1).all()
            block.gather.wait(tp.timeout_s)
            assert rows[block.number].flatten().tolist() == of_block[block.number].tolist()
        assert (whole.flatten() == positions).all()
