"""Makes NCCL's communicators before the first step, in an order in which no rank waits for ever.

NCCL makes a communicator at its group's first use, and for transfers one for each two ranks; until
the others come, that call holds up the host, though it only queues work later. In a pipeline two
neighbours whose first calls are both sends would wait for each other. gloo connects all ranks when
a group is made and needs none of this.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from raymega.parallel.comm.collectives import all_reduce, irecv, isend
from raymega.parallel.comm.process_groups import Group, Groups


def open_communicators(groups: Groups, device: torch.device) -> None:
    """Use every group of this rank once, and both pipeline groups between all that exchange.

    Every rank of the world must call it, at the same point.

    Raises:
        CommunicationError: A peer did not come in time.
    """
    sums = (
        groups.tp, groups.cp, groups.hierarchical_cp_size, groups.cp_outer, groups.dp, groups.replicas,
        groups.micro, groups.etp, groups.ep, groups.edp, groups.sharers, groups.copies,
        groups.expert_sharers, groups.expert_copies, *groups.nested, groups.embedding,
    )  # fmt: skip
    for group in {group.handle: group for group in sums}.values():
        all_reduce(torch.zeros(1, device=device), group)
    here = groups.pp_forward.index
    for lower, upper in pairs(groups.pp_forward.size):
        if here in (lower, upper):
            _send_one(groups.pp_forward, sender=lower, receiver=upper, device=device)
            _send_one(groups.pp_backward, sender=upper, receiver=lower, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pairs(num_ranks: int) -> Iterator[tuple[int, int]]:
    """Places that exchange messages under any schedule: neighbours, and the two ends of a loop.

    Those that follow each other until an even-odd change share no rank, so all of one turn meet at
    once; who is in two of them takes them in this order, as all others do.
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
