"""Norms of the whole model from each rank's part; every element counts once, on any layout.

The functions return one rank's sum of squares. `train/step.py` sums over ranks and takes the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from raymega.plan.layers.global_tensor import GlobalTensor

STRETCH = 1024

Shares = Iterable[tuple[GlobalTensor, torch.Tensor]]
"""Values that a rank counts, by tensor, such as GradBuffer.shares() or Optimizer.shares()."""


def local_norm_sq(shares: Shares, device: torch.device, *, is_wide: bool = False) -> torch.Tensor:
    """Return this rank's share of the squared norm, a float64 scalar on ``device``.

    Squares of float32 overflow above 1e19: where the sum is infinite, ask again with ``is_wide``, which
    takes float64 squares of all values and is ten times as slow.
    """
    counted = [values for _, values in shares]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        # One kernel reads many tensors, and float64 squares keep up with memory: both norms are this one.
        norms = torch._foreach_norm(counted, dtype=torch.float64)
    else:
        norms = tuple(_exact_norm(values) if is_wide else _norm(values) for values in counted)
    return torch.stack(norms).square().sum()


def local_norm_sq_by_group(
    shares: Shares, groups: Sequence[str], device: torch.device
) -> torch.Tensor:
    """Return this rank's share of each group's squared norm, float64 [len(groups)].

    Args:
        shares: Values that this rank counts.
        groups: Names of :func:`tensor_groups` of the whole model; equal on all ranks, so that results
            can be summed.
        device: Device of the result.
    """
    sums = torch.zeros(len(groups), dtype=torch.float64, device=device)
    for tensor, values in shares:
        sums[groups.index(tensor_group(tensor.name))] += _norm(values).square()
    return sums


def tensor_groups(tensors: Iterable[GlobalTensor]) -> tuple[str, ...]:
    """Return the names of the groups that ``tensors`` belong to, in their order."""
    return tuple(dict.fromkeys(tensor_group(tensor.name) for tensor in tensors))


def tensor_group(name: str) -> str:
    """Return a tensor's group: ``attention.q`` of ``layers.3.attention.q.weight``, ``final_norm``."""
    parts = name.split(".")[:-1]
    return ".".join(parts[2:] if parts[0] == "layers" else parts[:1])


def clip_factor(norm: float, max_grad_norm: float) -> float:
    """Return the factor for gradients of global norm ``norm``; ``max_grad_norm`` 0 never clips."""
    return max_grad_norm / norm if 0 < max_grad_norm < norm else 1.0


def _norm(values: torch.Tensor) -> torch.Tensor:
    """Return the norm, a float64 scalar: stretches in the values' own dtype, their sum in float64.

    Torch's float64 norm of float32 values converts each value first, which is ten times as slow.
    """
    flat = values.reshape(-1)
    rest = flat.numel() % STRETCH
    if rest == flat.numel():
        return _exact_norm(flat)
    # The remainder comes first, so that the view of the rest is contiguous.
    stretches = flat[rest:].view(-1, STRETCH)
    norms = torch.linalg.vector_norm(stretches, dim=1).double()
    return torch.linalg.vector_norm(torch.cat((norms, flat[:rest].double())) if rest else norms)


def _exact_norm(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float64)
