"""What communication refuses because it would be wrong without a word; it sends nothing itself."""

from __future__ import annotations

import torch

from raymega.errors import Fault, InternalError
from raymega.parallel.comm.process_groups import Group

DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
    }
)


def check_tensor(operation: str, tensor: torch.Tensor, group: Group) -> None:
    """Refuse what would be silently wrong, at size 1 too so that one rank finds the mistake."""
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
            "use parallel.collectives, or detach the tensor",
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


def check_rows(operation: str, tensor: torch.Tensor, group: Group, *, divisor: int) -> None:
    """Refuse a tensor whose dim 0 does not divide into the ranks' parts."""
    if tensor.ndim == 0 or tensor.shape[0] % divisor:
        raise _mistake(
            f"{operation} on group {group.name}: shape {tuple(tensor.shape)}",
            f"dim 0 must exist and be a multiple of {divisor}",
            "pad or reshape the tensor",
        )


def check_peer(operation: str, group: Group, peer: int) -> None:
    """Refuse a peer that is no other place of the group."""
    if peer == group.index or not 0 <= peer < group.size:
        raise _mistake(
            f"{operation} on group {group.name}: peer {peer} from place {group.index}",
            f"it must be another place in [0, {group.size})",
            "name the peer by its place in the group, not by its global rank",
        )


def _mistake(fact: str, rule: str, remedy: str) -> InternalError:
    return InternalError(Fault(fact=fact, rule=rule, remedy=remedy))
