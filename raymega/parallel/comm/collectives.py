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

from raymega.errors import CommunicationError, Fault, InternalError
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
DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
    }
)  # fmt: skip


def start_all_reduce(tensor: torch.Tensor, group: Group, op: str = "sum") -> Work:
    """Begin :func:`all_reduce`; the tensor must be left alone until it is waited for."""
    _check("all_reduce", tensor, group)
    options = c10d.AllreduceOptions()
    options.reduceOp = REDUCTIONS[op]
    return _start("all_reduce", tensor, group, lambda handle: handle.allreduce([tensor], options))


def all_reduce(tensor: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """Combine in place over the group by ``sum`` or ``max``, and return the same tensor."""
    start_all_reduce(tensor, group, op).wait(group.timeout_s)
    return tensor


def start_all_gather(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Begin :func:`all_gather`; the result may be read when it was waited for."""
    _check("all_gather", tensor, group, divisor=1)
    gathered = tensor
    if group.size > 1:
        gathered = tensor.new_empty((tensor.shape[0] * group.size, *tensor.shape[1:]))
    return gathered, _start(
        "all_gather", tensor, group, lambda handle: handle._allgather_base(gathered, tensor)
    )


def all_gather(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """x: [N, ...] -> [size * N, ...] in group order; the tensor itself when the group has size 1."""
    gathered, pending = start_all_gather(tensor, group)
    pending.wait(group.timeout_s)
    return gathered


def start_reduce_scatter(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Begin :func:`reduce_scatter`; leave the tensor alone, and the result, until waited for."""
    _check("reduce_scatter", tensor, group, divisor=group.size)
    rows = tensor
    if group.size > 1:
        rows = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:]))
    return rows, _start(
        "reduce_scatter",
        tensor,
        group,
        lambda handle: handle._reduce_scatter_base(rows, tensor, c10d.ReduceScatterOptions()),
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
    _check("reduce_scatter", tensor, group, divisor=group.size)
    if tensor.device.type == "cpu":
        return start_all_reduce(tensor, group)
    own = _own_part(tensor, group)
    return _start(
        "reduce_scatter",
        tensor,
        group,
        lambda handle: handle._reduce_scatter_base(own, tensor, c10d.ReduceScatterOptions()),
    )


def start_all_gather_in_place(tensor: torch.Tensor, group: Group) -> Work:
    """Begin to fill ``tensor`` [N], of which each rank has its even part, with all ranks' parts."""
    _check("all_gather", tensor, group, divisor=group.size)
    return _start(
        "all_gather",
        tensor,
        group,
        lambda handle: handle._allgather_base(tensor, _own_part(tensor, group)),
    )


def start_all_gather_into(whole: torch.Tensor, part: torch.Tensor, group: Group) -> Work:
    """Begin to fill ``whole`` [size * N] with all ranks' ``part`` [N], which lies elsewhere."""
    _check("all_gather", whole, group, divisor=group.size)
    _check("all_gather", part, group)
    return _start("all_gather", whole, group, lambda handle: handle._allgather_base(whole, part))


def start_all_to_all(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Begin an all-to-all of even parts: x [N, ...] -> [N, ...], everybody's i-th part at place i.

    Leave the tensor alone, and the result, until waited for.
    """
    _check("all_to_all", tensor, group, divisor=group.size)
    received = tensor if group.size == 1 else torch.empty_like(tensor)
    return received, _start(
        "all_to_all", tensor, group, lambda handle: handle.alltoall_base(received, tensor, [], [])
    )


def start_exchange(
    tensor: torch.Tensor, group: Group, *, sent: Sequence[int], received: Sequence[int]
) -> tuple[torch.Tensor, Work]:
    """Begin an all-to-all of uneven parts: ``sent[i]`` rows go to place i, ``received[i]`` come.

    x: [sum of sent, ...] -> [sum of received, ...] in group order. Who sends and who receives must
    agree. Leave the tensor alone, and the result, until waited for.
    """
    _check("exchange", tensor, group)
    assert tensor.shape[0] == sum(sent), "parts are the rows"
    rows = tensor
    if group.size > 1:
        rows = tensor.new_empty((sum(received), *tensor.shape[1:]))
    return rows, _start(
        "exchange",
        tensor,
        group,
        lambda handle: handle.alltoall_base(rows, tensor, [*received], [*sent]),
    )


def start_shift(tensor: torch.Tensor, group: Group, *, by: int) -> tuple[torch.Tensor, Work]:
    """Begin to give ``tensor`` to the rank ``by`` places on, around, and to get one of its shape.

    One collective that sends to one and receives from one: NCCL needs both at once, and gloo tells
    of a collective, not of a transfer, when it is complete.
    """
    _check("shift", tensor, group)
    received = tensor if group.size == 1 else torch.empty_like(tensor)

    def sizes(peer: int) -> list[int]:
        return [tensor.numel() * (place == peer % group.size) for place in range(group.size)]

    here, flat, arriving = group.index, tensor.view(-1), received.view(-1)
    return received, _start(
        f"shift by {by}",
        tensor,
        group,
        lambda handle: handle.alltoall_base(arriving, flat, sizes(here - by), sizes(here + by)),
    )


def broadcast(tensor: torch.Tensor, group: Group, source: int) -> torch.Tensor:
    """Overwrite in place with the values of the rank at place ``source``; return the tensor."""
    _check("broadcast", tensor, group)
    options = c10d.BroadcastOptions()
    options.rootRank = source
    _start("broadcast", tensor, group, lambda handle: handle.broadcast([tensor], options)).wait(
        group.timeout_s
    )
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
    _check("send", tensor, group)
    _check_peer("send", group, peer)
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
    _check("receive", tensor, group)
    _check_peer("receive", group, peer)
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
    wait: Wait = wait_in_turns,
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
    return f"{operation} on group {group.name} of ranks {rank_list(group.ranks)}"


def _own_part(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return tensor.chunk(group.size)[group.index]


def rank_list(ranks: Sequence[int]) -> str:
    """``ranks`` for a message: all, or of more than 8 the first and how many there are."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"


def _check(operation: str, tensor: torch.Tensor, group: Group, *, divisor: int = 0) -> None:
    """Refuse what would be silently wrong, at size 1 too so that one rank finds the mistake.

    With a ``divisor``, dim 0 has to divide into so many parts.
    """
    where = f"{operation} on group {group.name}"
    if not tensor.is_contiguous():
        raise _mistake(
            f"{where}: shape {tuple(tensor.shape)} has strides {tensor.stride()}",
            "gloo moves the wrong elements of a strided tensor without an error",
            "pass x = tensor.contiguous() and go on with x",
        )
    if tensor.dtype not in DTYPES:
        raise _mistake(
            f"{where}: dtype {tensor.dtype}",
            f"it must be one of {', '.join(sorted(str(d)[6:] for d in DTYPES))}",
            "send another format as tensor.view(torch.uint8), or convert what is to be summed",
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise _mistake(
            f"{where}: the tensor is part of a gradient graph",
            "no gradient would flow through the operation",
            "use raymega.parallel.tensor_parallel.mappings, or detach the tensor",
        )
    if divisor and (tensor.ndim == 0 or tensor.shape[0] % divisor):
        raise _mistake(
            f"{where}: shape {tuple(tensor.shape)}",
            f"dim 0 must exist and be a multiple of {divisor}",
            "pad or reshape the tensor",
        )
    if group.handle is None:
        return
    served = {device.type for device in group.resolve()._device_types}
    if tensor.device.type not in served:
        raise _mistake(
            f"{where}: the tensor lives on {tensor.device}",
            f"the group serves {', '.join(sorted(served))}",
            "move the tensor to the worker's device",
        )


def _check_peer(operation: str, group: Group, peer: int) -> None:
    """Refuse a peer that is no other place of the group."""
    if peer == group.index or not 0 <= peer < group.size:
        raise _mistake(
            f"{operation} on group {group.name}: peer {peer} from place {group.index}",
            f"it must be another place in [0, {group.size})",
            "name the peer by its place in the group, not by its global rank",
        )


def _mistake(fact: str, rule: str, remedy: str) -> InternalError:
    return InternalError(Fault(fact=fact, rule=rule, remedy=remedy))
