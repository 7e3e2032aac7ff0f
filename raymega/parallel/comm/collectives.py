"""The one wrapper around torch.distributed: collectives and transfers with checked arguments.

gloo moves the wrong elements of a strided tensor and reports no error. torch's public functions do
nothing at all on a group where coalescing once failed. So every operation checks its tensor, calls
the ProcessGroup directly, and turns a failure into a CommunicationError that names the group, its
ranks and the time waited. Nothing here is differentiable: see `parallel/tensor_parallel/mappings.py`.
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
from raymega.parallel.comm.world import raise_if_aborted

# The options of a collective take a ReduceOp, not a name.
REDUCTIONS = {
    "sum": dist.ReduceOp(dist.ReduceOp.SUM),
    "max": dist.ReduceOp(dist.ReduceOp.MAX),
}
ALL_TO_ALL, REDUCE_SCATTER = c10d.AllToAllOptions(), c10d.ReduceScatterOptions()
# Formats that are sent and reduced as they are; others, such as float8, travel as a view of uint8.
DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
    }
)  # fmt: skip


def start_all_reduce(tensor: torch.Tensor, group: Group, op: str = "sum") -> Work:
    """Start :func:`all_reduce`; neither read nor write the tensor before the wait returns."""
    _check("all_reduce", tensor, group)
    options = c10d.AllreduceOptions()
    options.reduceOp = REDUCTIONS[op]
    return _start("all_reduce", tensor, group, lambda handle: handle.allreduce([tensor], options))


def all_reduce(tensor: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """Reduce ``tensor`` in place over the group by ``sum`` or ``max``, and return it: equal bits on all ranks."""
    for each in group.axes or (group,):
        start_all_reduce(tensor, each, op).wait(each.timeout_s)
    # groups of one axis may add in different orders: all take the bits of the first
    for axis in group.axes:
        broadcast(tensor, axis, source=0)
    return tensor


def start_all_gather(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Start :func:`all_gather`; read the result only after the wait."""
    _check("all_gather", tensor, group, divisor=1)
    gathered = tensor
    if group.size > 1:
        gathered = tensor.new_empty((tensor.shape[0] * group.size, *tensor.shape[1:]))
    return gathered, _start(
        "all_gather", tensor, group, lambda handle: handle._allgather_base(gathered, tensor)
    )


def all_gather(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather [N, ...] to [size * N, ...] in group order; return the tensor itself at group size 1."""
    if group.axes:  # as a sum of which each rank has its own rows
        rows = tensor.new_zeros((group.size, *tensor.shape))
        rows[group.index] = tensor
        return all_reduce(rows, group).flatten(0, 1)
    gathered, pending = start_all_gather(tensor, group)
    pending.wait(group.timeout_s)
    return gathered


def start_reduce_scatter(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Start :func:`reduce_scatter`; touch neither the tensor nor the result before the wait returns."""
    _check("reduce_scatter", tensor, group, divisor=group.size)
    rows = tensor
    if group.size > 1:
        rows = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:]))
    return rows, start_reduce_scatter_into(rows, tensor, group)


def reduce_scatter(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum [N, ...] over the group and return this rank's rows [N / size, ...] of the sum.

    Return the tensor itself at group size 1.
    """
    rows, pending = start_reduce_scatter(tensor, group)
    pending.wait(group.timeout_s)
    return rows


def start_reduce_scatter_in_place(tensor: torch.Tensor, group: Group) -> Work:
    """Start to replace this rank's even part of ``tensor`` [N] by the sum; other parts get undefined.

    gloo has no reduce-scatter: torch emulates it by an all-reduce of a copy. On CPUs this function
    all-reduces in place instead, which needs no copy and lets a callback see the completion.
    """
    _check("reduce_scatter", tensor, group, divisor=group.size)
    if tensor.device.type == "cpu":
        return start_all_reduce(tensor, group)
    return start_reduce_scatter_into(_own_part(tensor, group), tensor, group)


def start_reduce_scatter_into(own: torch.Tensor, tensor: torch.Tensor, group: Group) -> Work:
    """Start :func:`reduce_scatter` of ``tensor`` [size * N, ...] into ``own`` [N, ...]."""
    for each, divisor in ((tensor, group.size), (own, 1)):
        _check("reduce_scatter", each, group, divisor=divisor)
    return _start(
        "reduce_scatter", tensor, group,
        lambda handle: handle._reduce_scatter_base(own, tensor, REDUCE_SCATTER),
    )  # fmt: skip


def start_all_gather_in_place(tensor: torch.Tensor, group: Group) -> Work:
    """Start to all-gather within ``tensor`` [N], of which each rank has filled its own even part."""
    _check("all_gather", tensor, group, divisor=group.size)
    return _start(
        "all_gather", tensor, group,
        lambda handle: handle._allgather_base(tensor, _own_part(tensor, group)),
    )  # fmt: skip


def start_all_gather_into(whole: torch.Tensor, part: torch.Tensor, group: Group) -> Work:
    """Start to all-gather ``part`` [N] into ``whole`` [size * N], two tensors that share no memory."""
    _check("all_gather", whole, group, divisor=group.size)
    _check("all_gather", part, group)
    return _start("all_gather", whole, group, lambda handle: handle._allgather_base(whole, part))


def start_all_to_all(tensor: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """Start an all-to-all of even parts: [N, ...] -> [N, ...], part i goes to the rank at place i.

    Touch neither the tensor nor the result before the wait returns.
    """
    _check("all_to_all", tensor, group, divisor=group.size)
    received = tensor if group.size == 1 else torch.empty_like(tensor)
    return received, _start(
        "all_to_all", tensor, group, lambda handle: handle.alltoall_base(received, tensor, [], [])
    )


def start_exchange(
    tensor: torch.Tensor, group: Group, *, sent: Sequence[int], received: Sequence[int]
) -> tuple[torch.Tensor, Work]:
    """Start an all-to-all of uneven parts: send ``sent[i]`` rows to place i, receive ``received[i]``.

    [sum of sent, ...] -> [sum of received, ...] in group order. Sender and receiver must agree on the
    counts. Touch neither the tensor nor the result before the wait returns.
    """
    _check("exchange", tensor, group)
    assert tensor.shape[0] == sum(sent), "parts are the rows"
    rows = tensor
    if group.size > 1:
        rows = tensor.new_empty((sum(received), *tensor.shape[1:]))
    launch = partial(_exchange, rows, tensor, [*received], [*sent])
    return rows, _start("exchange", tensor, group, launch)


def start_block_gathers(
    part: torch.Tensor, whole: torch.Tensor, group: Group, *, num_blocks: int
) -> list[Work]:
    """Start to fetch the parts of all ranks, one block of neighbours after another: an all-gather by blocks.

    The group's places form ``num_blocks`` even blocks. Operation i brings the parts of the block that is i blocks
    further on the ring than this rank's own, and sends this rank's part to the block as far back.

    Args:
        part: Part of this rank, [N, ...].
        whole: Parts of all ranks, [size * N, ...]; operation i writes the rows of its block.
        group: Ranks that gather.
        num_blocks: Number of blocks; divides the group's size.
    """
    if num_blocks == 1:
        return [start_all_gather_into(whole, part, group)]
    _check("block_gather", part, group)
    _check("block_gather", whole, group, divisor=group.size)
    # what each operation takes and sends, made once for all of them
    members, size, length = group.size // num_blocks, group.size, part.shape[0]
    own, rows, nothing = group.index // members, whole.chunk(size), part.new_empty(0)
    # gloo has no all-to-all of tensors at several places: the part is laid out once for each receiver
    copies = torch.cat([part] * members) if part.is_cpu else part
    pending = []
    for ahead in range(num_blocks):
        sources, targets = (_block((own + by) % num_blocks, members) for by in (ahead, -ahead))
        launch: Callable[[dist.ProcessGroup], dist.Work]
        if part.is_cpu:
            block = whole[sources.start * length : sources.stop * length]
            takes, sends = [0] * size, [0] * size
            takes[sources], sends[targets] = [length] * members, [length] * members
            launch = partial(_exchange, block, copies, takes, sends)
        else:
            received, sent = [nothing] * size, [nothing] * size
            received[sources], sent[targets] = rows[sources], [part] * members
            launch = partial(_all_to_all, received, sent)
        pending.append(_start(f"gather of block {ahead}", part, group, launch))
    return pending


def _exchange(
    received: torch.Tensor, sent: torch.Tensor, takes: list[int], sends: list[int], handle: dist.ProcessGroup
) -> dist.Work:  # fmt: skip
    return handle.alltoall_base(received, sent, takes, sends)


def _all_to_all(
    received: list[torch.Tensor], sent: list[torch.Tensor], handle: dist.ProcessGroup
) -> dist.Work:
    return handle.alltoall(received, sent, ALL_TO_ALL)


def start_shift(tensor: torch.Tensor, group: Group, *, by: int) -> tuple[torch.Tensor, Work]:
    """Start to send ``tensor`` to the rank ``by`` places further on the ring, and to receive its equal.

    The shift is one all-to-all with a single peer each way. NCCL needs send and receive in one call,
    and gloo reports completion of a collective, but not of a point-to-point transfer.
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
    """Overwrite ``tensor`` in place with that of the rank at place ``source``, and return it."""
    if group.axes:  # as a sum to which the others add nothing
        return all_reduce(tensor if group.index == source else tensor.zero_(), group)
    _check("broadcast", tensor, group)
    options = c10d.BroadcastOptions()
    options.rootRank = source
    _start("broadcast", tensor, group, lambda handle: handle.broadcast([tensor], options)).wait(
        group.timeout_s
    )
    return tensor


def barrier(group: Group) -> None:
    """Return when every rank of the group has called it; on a GPU the host waits as well."""
    if group.handle is None:
        return
    is_gpu = (*group.axes, group)[0].resolve().name() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    # item() copies to the host, which makes the host wait for the stream.
    all_reduce(torch.zeros(1, device=device), group).item()
    raise_if_aborted("a barrier's sum")


def isend(tensor: torch.Tensor, group: Group, peer: int, tag: int) -> Work:
    """Start to send to the rank at place ``peer``; do not write to the tensor before the wait returns.

    Sends to one peer arrive in order. Over gloo the ``tag`` must match as well.
    """
    _check("send", tensor, group)
    _check_peer("send", group, peer)
    return _start(
        f"send to rank {group.ranks[peer]}, tag {tag},", tensor, group,
        lambda handle: handle.send([tensor], peer, tag), wait_once,
    )  # fmt: skip


def irecv(tensor: torch.Tensor, group: Group, peer: int, tag: int) -> Work:
    """Start to receive from the rank at place ``peer`` into ``tensor``.

    Shape and dtype must equal the sender's: gloo ends the process when the sizes differ.
    """
    _check("receive", tensor, group)
    _check_peer("receive", group, peer)
    return _start(
        f"receive from rank {group.ranks[peer]}, tag {tag},", tensor, group,
        lambda handle: handle.recv([tensor], peer, tag), wait_once,
    )  # fmt: skip


def is_communication_error(error: BaseException) -> bool:
    """Return whether ``error`` is of a kind that another rank usually caused."""
    return isinstance(error, CommunicationError | dist.DistError)


def _start(
    operation: str,
    tensor: torch.Tensor,
    group: Group,
    launch: Callable[[dist.ProcessGroup], dist.Work],
    wait: Wait = wait_in_turns,
) -> Work:
    """Launch an operation on torch's group; at group size 1 return a Work that is complete."""
    what = partial(_name, operation, group)
    # wait: bounded by the host over gloo, by the watcher of NCCL's errors on a GPU
    if not tensor.is_cpu:
        wait = wait_on_stream
    # one rank: the callers have made the result the tensor itself
    if group.handle is None:
        return Work(what, None, wait, group.waited)
    try:
        # The clock is read first: a launch may block, and the part counts as given only after it.
        handle, launched_s = group.resolve(), time.perf_counter()
        return Work(
            what, launch(handle), wait, group.waited, launched_s=launched_s, keeps_alive=launch
        )
    except RuntimeError as error:
        raise failure(what(), 0.0, group.timeout_s, error) from error


def _name(operation: str, group: Group) -> str:
    return f"{operation} on group {group.name} of ranks {rank_list(group.ranks)}"


def _own_part(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return tensor.chunk(group.size)[group.index]


def _block(number: int, members: int) -> slice:
    return slice(number * members, (number + 1) * members)


def rank_list(ranks: Sequence[int]) -> str:
    """Return ``ranks`` as text for a message; of more than 8 the first 8 and the total."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"


def _check(operation: str, tensor: torch.Tensor, group: Group, *, divisor: int = 0) -> None:
    """Raise InternalError for a tensor that torch would send wrongly without an error.

    Group size 1 is checked too, so that a run on one rank finds the mistake. With a ``divisor``, dim 0
    must be a multiple of it.
    """
    # called for each message: no text is made before a mistake is found
    if not tensor.is_contiguous():
        fault = (
            f"shape {tuple(tensor.shape)} has strides {tensor.stride()}",
            "gloo moves the wrong elements of a strided tensor without an error",
            "set x = tensor.contiguous() and pass x",
        )
    elif tensor.dtype not in DTYPES:
        fault = (
            f"dtype {tensor.dtype}",
            f"it must be one of {', '.join(sorted(str(d)[6:] for d in DTYPES))}",
            "send another format as tensor.view(torch.uint8), or convert what is to be summed",
        )
    # autograd: the operation would cut the graph
    elif tensor.requires_grad and torch.is_grad_enabled():
        fault = (
            "the tensor is part of a gradient graph",
            "no gradient would flow through the operation",
            "use raymega.parallel.tensor_parallel.mappings, or detach the tensor",
        )
    # even parts
    elif divisor and (tensor.ndim == 0 or tensor.shape[0] % divisor):
        fault = (
            f"shape {tuple(tensor.shape)}",
            f"dim 0 must exist and be a multiple of {divisor}",
            "pad or reshape the tensor",
        )
    # device: gloo groups take CPU tensors, NCCL groups GPU tensors
    elif group.devices and tensor.device.type not in group.devices:
        fault = (
            f"the tensor lives on {tensor.device}",
            f"the group serves {', '.join(sorted(group.devices))}",
            "move the tensor to the worker's device",
        )
    else:
        return
    fact, rule, remedy = fault
    raise _mistake(f"{operation} on group {group.name}: {fact}", rule, remedy)


def _check_peer(operation: str, group: Group, peer: int) -> None:
    """Raise InternalError unless ``peer`` is another place of the group."""
    if peer == group.index or not 0 <= peer < group.size:
        raise _mistake(
            f"{operation} on group {group.name}: peer {peer} from place {group.index}",
            f"it must be another place in [0, {group.size})",
            "name the peer by its place in the group, not by its global rank",
        )


def _mistake(fact: str, rule: str, remedy: str) -> InternalError:
    return InternalError(Fault(fact=fact, rule=rule, remedy=remedy))
