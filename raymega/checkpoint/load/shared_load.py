"""Divides a restore among ranks that hold the same blocks: each block is read once, and sent to the others.

Without it every replica reads all of its state, so a restore from an object store grows with the replicas of a
node and of the run. Sending takes the network between ranks, which is faster than that to a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from raymega.parallel.comm.collectives import broadcast
from raymega.parallel.comm.process_groups import Group, Groups
from raymega.parallel.data_parallel.state_tensors import TensorBlock
from raymega.storage.registry import local_path


def groups_to_share(groups: Groups, uri: str) -> tuple[Group, ...]:
    """Return the groups whose ranks may hold equal blocks; none for a folder, which each reads as fast itself."""
    if local_path(uri) is not None:
        return ()
    return (groups.replicas, groups.copies, groups.edp, groups.expert_copies)


class SharedLoad:
    """Blocks of a rank, and which of them it reads.

    Attributes:
        mine: Blocks that this rank reads: those that no other rank holds, and its share of the others.
    """

    def __init__(self, blocks: Sequence[TensorBlock], groups: Iterable[Group]) -> None:
        """Divide ``blocks`` evenly by bytes; the ranks of a group come to the same division.

        Args:
            blocks: Blocks of the rank, in an order that is the same on all their holders.
            groups: Groups that ranks with equal blocks may form, in an order that is the same on all ranks.
        """
        of_ranks = {
            group.ranks: group for group in groups if group.handle
        }  # without those of one rank
        self._sent: list[tuple[Group, int, TensorBlock]] = []
        self.mine = [block for block in blocks if block.holders not in of_ranks]
        # group by group on every rank, so that two ranks that meet in several never wait for each other
        for ranks, group in of_ranks.items():
            held = [block for block in blocks if block.holders == ranks]
            total, before = sum(block.values.nbytes for block in held), 0
            # neighbours go to one reader, as a file has them side by side
            for block in held:
                reader = before * group.size // max(total, 1)
                before += block.values.nbytes
                self._sent.append((group, reader, block))
                if reader == group.index:
                    self.mine.append(block)

    def send(self, progress: Callable[[], None] = lambda: None) -> None:
        """Send what this rank has read, and receive the rest; all ranks of the groups call it together."""
        for group, reader, block in self._sent:
            send_block(block, group, reader)
            progress()


def send_block(block: TensorBlock, group: Group, source: int) -> None:
    """Overwrite ``block`` with its values on the rank at place ``source`` of ``group``, bit for bit."""
    # bytes, as some formats of state have no collective of their own
    values = block.values.detach()
    sent = values.contiguous().view(-1).view(torch.uint8)
    broadcast(sent, group, source)
    values.copy_(sent.view(values.dtype).view(values.shape))
