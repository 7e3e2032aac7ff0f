"""Create NCCL's communicators before the first step, in an order that cannot deadlock.

NCCL creates a communicator at the first use of a group, and for point-to-point transfers one for
each pair of ranks. That first call blocks the host until the peers arrive; later calls only queue
work. Two pipeline neighbours whose first calls are both sends would wait for each other. gloo
connects all ranks when a group is made and needs none of this.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from raymega.parallel.comm.collectives import all_reduce, irecv, isend
from raymega.parallel.comm.process_groups import Group, Groups


def open_communicators(groups: Groups, device: torch.device) -> None:
    """Use every communicator of this rank once, and both pipeline groups between each pair that exchanges.

    Every rank of the world must call it at the same point.

    Raises:
        CommunicationError: A peer did not arrive within the group's timeout.
    """
    sums = (
        groups.tp, groups.cp, groups.cp_inner, groups.cp_outer, groups.dp, groups.replicas,
        groups.micro, groups.etp, groups.ep, groups.edp, groups.sharers, groups.copies,
        groups.expert_sharers, groups.expert_copies, *groups.nested, groups.embedding,
    )  # fmt: skip
    # collectives: several names may share one communicator, so each handle is used once
    opened = {group.handle: group for group in (groups.world, *sums) if group.handle}
    for group in opened.values():
        all_reduce(torch.zeros(1, device=device), group)
    # pipeline: one message each way for each pair, in the order of pairs()
    here = groups.pp_forward.index
    for lower, upper in pairs(groups.pp_forward.size):
        if here in (lower, upper):
            _send_one(groups.pp_forward, sender=lower, receiver=upper, device=device)
            _send_one(groups.pp_backward, sender=upper, receiver=lower, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pairs(num_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of pipeline places that exchange messages under any schedule.

    They are the neighbours, and the two ends for interleaved schedules. Even pairs come first, then odd
    ones. Pairs of one half share no rank, so all of them meet at once. A rank in two pairs takes them in
    this order, as its peers do.
    """
    for first in (0, 1):
        for lower in range(first, num_ranks - 1, 2):
            yield lower, lower + 1
    if num_ranks > 2:
        yield 0, num_ranks - 1


def _send_one(group: Group, *, sender: int, receiver: int, device: torch.device) -> None:
    token = torch.zeros(1, device=device)
    if group.index == sender:
        pending = isend(token, group, receiver, tag=0)
    else:
        pending = irecv(token, group, sender, tag=0)
    pending.wait(group.timeout_s)
