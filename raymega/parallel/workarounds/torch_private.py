"""Private names of torch, in one file, except those of fused and fp8 kernels.

Goes when torch.distributed can look up groups by name, abort all of them, tell their errors and reset their
count, and torch.autograd reports whether it is inside backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._C._distributed_c10d import ErrorType, _resolve_process_group
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName


def process_group_of(handle: GroupName) -> ProcessGroup:
    """Return the process group that torch registered under a name."""
    return _resolve_process_group(handle)


def device_types(handle: GroupName) -> frozenset[str]:
    """Return the types of device whose tensors a process group sends."""
    return frozenset(device.type for device in process_group_of(handle)._device_types)


def is_in_backward() -> bool:
    """Return whether the calling thread is inside a backward pass, by torch.utils.checkpoint's test."""
    return torch._C._current_graph_task_id() != -1


def world_handle() -> GroupName:
    """Return torch's name for the group of all ranks."""
    return c10d._get_default_group().group_name


def count_groups_anew() -> None:
    """Reset torch's count of groups, so that the next world is the process's first.

    torch uses the count in the keys of a rendezvous, and a failed rendezvous has counted too. Without the
    reset, a replacement for a lost process would wait under another key for ever.
    """
    c10d._world.group_count = 0


def abort_groups() -> list[ProcessGroup]:
    """Abort the operations in all groups of this process.

    Returns:
        The groups. The last reference to a gloo group destroys it, once its operation has ended.
    """
    groups = list(c10d._world.pg_map)
    c10d._abort_process_group()
    return groups


def nccl_errors() -> Iterator[tuple[str, str]]:
    """Yield each NCCL group in which torch's watchdog has noted an error, and the name of the error."""
    for group in list(c10d._world.pg_map):
        error = group._get_backend(torch.device("cuda")).get_error()
        if error != ErrorType.SUCCESS:
            yield group.group_desc.replace("default_pg", "world"), error.name
