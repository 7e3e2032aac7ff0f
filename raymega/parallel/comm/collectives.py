"""The one wrapper around torch.distributed: collectives and transfers that refuse to be wrong.

gloo moves the wrong elements of a strided tensor without a word, and torch's own functions do
nothing at all on a group where coalescing once failed. So every operation is checked here, goes
straight to the group's handle, and turns a failure into a CommunicationError that says who waited
for whom. It owns no group, and differentiates nothing: that is parallel.collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from raymega.errors import CommunicationError
from raymega.parallel.comm.checks import check_peer, check_rows, check_tensor
from raymega.parallel.comm.process_groups import Group
from raymega.parallel.comm.work import (
    Wait,
    Work,
    failure,
    wait_in_turns,
    wait_on_stream,
    wait_once,
)

REDUCTIONS = {
    "sum": dist.ReduceOp(dist.ReduceOp.SUM),
    "max": dist.ReduceOp(dist.ReduceOp.MAX),
}


def start_all_reduce(tensor: torch.Tensor, group: Group, op: str = "sum") -> Work:
    """Begin :func:`all_reduce`; the tensor must be left alone until it is waited for."""
    check_tensor("all_reduce", tensor, group)
    options = c10d.AllreduceOptions()
    options.reduceOp = REDUCTIONS[op]
    return _start(
        "all_reduce",
        tensor,
        group,
        lambda handle: handle.allreduce([tensor], options),
        wait_in_turns,
    )


def all_reduce(tensor: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """Combine in place over the group by ``sum`` or ``max``, and return the same tensor."""
    start_all_reduce(tensor, group, op).wait(group.timeout_s)
    return tensor


def start_all_gather(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Begin :func:`all_gather`; the result may be read when it was waited for."""
    check_tensor("all_gather", tensor, group)
    check_rows("all_gather", tensor, group, divisor=1)
    gathered = tensor
    if group.size > 1:
        gathered = tensor.new_empty((tensor.shape[0] * group.size, *tensor.shape[1:]))
    return gathered, _start(
        "all_gather",
        tensor,
        group,
        lambda handle: handle._allgather_base(gathered, tensor),
        wait_in_turns,
    )


def all_gather(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """x: [N, ...] -> [size * N, ...] in group order; the tensor itself when the group has size 1."""
    gathered, pending = start_all_gather(tensor, group)
    pending.wait(group.timeout_s)
    return gathered


def start_reduce_scatter(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Begin :func:`reduce_scatter`; leave the tensor alone, and the result, until waited for."""
    check_tensor("reduce_scatter", tensor, group)
    check_rows("reduce_scatter", tensor, group, divisor=group.size)
    rows = tensor
    if group.size > 1:
        rows = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:]))
    options = c10d.ReduceScatterOptions()
    return rows, _start(
        "reduce_scatter",
        tensor,
        group,
        lambda handle: handle._reduce_scatter_base(rows, tensor, options),
        wait_in_turns,
    )


def reduce_scatter(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """x: [N, ...] -> [N / size, ...], own rows of the sum; itself when the group has size 1."""
    rows, pending = start_reduce_scatter(tensor, group)
    pending.wait(group.timeout_s)
    return rows


def start_reduce_scatter_in_place(tensor: torch.Tensor, group: Group) -> Work:
    """Begin to replace this rank's even part of ``tensor`` [N] by the sum; the rest is then void.

    gloo has no reduce-scatter: torch's copies the tensor and all-reduces it. So does this one, but
    without the copy and so that its completion can be watched.
    """
    check_tensor("reduce_scatter", tensor, group)
    check_rows("reduce_scatter", tensor, group, divisor=group.size)
    if tensor.device.type == "cpu":
        return start_all_reduce(tensor, group)
    options = c10d.ReduceScatterOptions()
    return _start(
        "reduce_scatter",
        tensor,
        group,
        lambda handle: handle._reduce_scatter_base(_own_part(tensor, group), tensor, options),
        wait_in_turns,
    )


def start_all_gather_in_place(tensor: torch.Tensor, group: Group) -> Work:
    """Begin to fill ``tensor`` [N], of which each rank has its even part, with all ranks' parts."""
    check_tensor("all_gather", tensor, group)
    check_rows("all_gather", tensor, group, divisor=group.size)
    return _start(
        "all_gather",
        tensor,
        group,
        lambda handle: handle._allgather_base(tensor, _own_part(tensor, group)),
        wait_in_turns,
    )


def start_all_gather_into(whole: torch.Tensor, part: torch.Tensor, group: Group) -> Work:
    """Begin to fill ``whole`` [size * N] with all ranks' ``part`` [N], which lies elsewhere."""
    check_tensor("all_gather", whole, group)
    check_tensor("all_gather", part, group)
    check_rows("all_gather", whole, group, divisor=group.size)
    return _start(
        "all_gather",
        whole,
        group,
        lambda handle: handle._allgather_base(whole, part),
        wait_in_turns,
    )


def start_all_to_all(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Begin :func:`all_to_all`; leave the tensor alone, and the result, until waited for."""
    check_tensor("all_to_all", tensor, group)
    check_rows("all_to_all", tensor, group, divisor=group.size)
    received = tensor if group.size == 1 else torch.empty_like(tensor)
    return received, _start(
        "all_to_all",
        tensor,
        group,
        lambda handle: handle.alltoall_base(received, tensor, [], [], c10d.AllToAllOptions()),
        wait_in_turns,
    )


def all_to_all(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """x: [N, ...] -> [N, ...]: the rank at place i gets everybody's i-th even part, in group order."""
    received, pending = start_all_to_all(tensor, group)
    pending.wait(group.timeout_s)
    return received


def start_exchange(
    tensor: torch.Tensor, group: Group, *, sent: Sequence[int], received: Sequence[int]
) -> tuple[torch.Tensor, Work]:
    """Begin an all-to-all of uneven parts: ``sent[i]`` rows go to place i, ``received[i]`` come.

    x: [sum of sent, ...] -> [sum of received, ...] in group order. Who sends and who receives must
    agree. Leave the tensor alone, and the result, until waited for.
    """
    check_tensor("exchange", tensor, group)
    assert tensor.shape[0] == sum(sent), "parts are the rows"
    rows = tensor
    if group.size > 1:
        rows = tensor.new_empty((sum(received), *tensor.shape[1:]))
    options = c10d.AllToAllOptions()
    return rows, _start(
        "exchange",
        tensor,
        group,
        lambda handle: handle.alltoall_base(rows, tensor, [*received], [*sent], options),
        wait_in_turns,
    )


def start_shift(tensor: torch.Tensor, group: Group, *, by: int) -> tuple[torch.Tensor, Work]:
    """Begin to give ``tensor`` to the rank ``by`` places on, around, and to get one of its shape.

    One collective that sends to one and receives from one: NCCL needs both at once, and gloo tells
    of a collective, not of a transfer, when it is complete.
    """
    check_tensor("shift", tensor, group)
    received = tensor if group.size == 1 else torch.empty_like(tensor)

    def sizes(peer: int) -> list[int]:
        return [tensor.numel() * (place == peer % group.size) for place in range(group.size)]

    return received, _start(
        f"shift by {by}",
        tensor,
        group,
        lambda handle: handle.alltoall_base(
            received.view(-1),
            tensor.view(-1),
            sizes(group.index - by),
            sizes(group.index + by),
            c10d.AllToAllOptions(),
        ),
        wait_in_turns,
    )


def broadcast(tensor: torch.Tensor, group: Group, source: int) -> torch.Tensor:
    """Overwrite in place with the values of the rank at place ``source``; return the tensor."""
    check_tensor("broadcast", tensor, group)
    options = c10d.BroadcastOptions()
    options.rootRank = source
    _start(
        "broadcast",
        tensor,
        group,
        lambda handle: handle.broadcast([tensor], options),
        wait_in_turns,
    ).wait(group.timeout_s)
    return tensor


def barrier(group: Group) -> None:
    """Return when every rank of the group has called it; on a GPU it waits for the host too."""
    if group.handle is None:
        return
    is_gpu = group.resolve().name() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    all_reduce(torch.zeros(1, device=device), group).item()


def isend(tensor: torch.Tensor, group: Group, peer: int, tag: int) -> Work:
    """Begin to send to the rank at place ``peer``; leave the tensor alone until waited for.

    Sends to one peer arrive in order; over gloo the ``tag`` must match as well.
    """
    check_tensor("send", tensor, group)
    check_peer("send", group, peer)
    return _start(
        f"send to rank {group.ranks[peer]}, tag {tag},",
        tensor,
        group,
        lambda handle: handle.send([tensor], peer, tag),
        wait_once,
    )


def irecv(tensor: torch.Tensor, group: Group, peer: int, tag: int) -> Work:
    """Begin to receive from the rank at place ``peer`` into ``tensor``.

    Shape and dtype must be the sender's: gloo ends the process when the sizes differ.
    """
    check_tensor("receive", tensor, group)
    check_peer("receive", group, peer)
    return _start(
        f"receive from rank {group.ranks[peer]}, tag {tag},",
        tensor,
        group,
        lambda handle: handle.recv([tensor], peer, tag),
        wait_once,
    )


def is_communication_error(error: BaseException) -> bool:
    """Whether another rank is, as a rule, the cause of ``error``."""
    return isinstance(error, CommunicationError | dist.DistError)


def _start(
    operation: str,
    tensor: torch.Tensor,
    group: Group,
    launch: Callable[[dist.ProcessGroup], dist.Work],
    wait: Wait,
) -> Work:
    """Launch on torch's group; nothing to do and nothing to wait for at size 1."""
    what = partial(_name, operation, group)
    if tensor.device.type != "cpu":
        wait = wait_on_stream
    if group.handle is None:
        return Work(what, None, wait, group.waited)
    try:
        handle, launched_s = group.resolve(), time.perf_counter()
        return Work(what, launch(handle), wait, group.waited, launched_s=launched_s)
    except RuntimeError as error:
        raise failure(what(), 0.0, group.timeout_s, error) from error


def _name(operation: str, group: Group) -> str:
    return f"{operation} on group {group.name} of ranks {_ranks(group)}"


def _own_part(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return tensor.chunk(group.size)[group.index]


def _ranks(group: Group) -> str:
    shown = ", ".join(map(str, group.ranks[:8]))
    return shown if group.size <= 8 else f"{shown}, ... ({group.size} in all)"
