"""Names of torch that begin with an underscore, in one file; fused and fp8 kernels apart.

Goes when torch.distributed finds groups by name, aborts all of them and forgets how many there were,
and torch.autograd says that it is inside backward.
"""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName


def process_group_of(handle: GroupName) -> ProcessGroup:
    """The communicator that torch has under a name."""
    return _resolve_process_group(handle)


def is_in_backward() -> bool:
    """Whether the calling thread is inside a backward pass, as torch.utils.checkpoint asks."""
    return torch._C._current_graph_task_id() != -1


def world_handle() -> GroupName:
    """torch's name for the group of all ranks."""
    return c10d._get_default_group().group_name


def count_groups_anew() -> None:
    """Let the next world be the process's first.

    torch counts the groups of a process and meets under that number. A meeting that failed has
    counted: a process that comes in the place of a lost one would look elsewhere, for ever.
    """
    c10d._world.group_count = 0


def abort_groups() -> list[ProcessGroup]:
    """Fail what waits in any group of this process.

    Returns:
        The groups. The last reference to one of gloo tears it down, once its operation has ended.
    """
    groups = list(c10d._world.pg_map)
    c10d._abort_process_group()
    return groups
