"""Clipping by the true global norm: every element of the whole model counts once.

It sums what one rank has; the sum over ranks and the root are train.step's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raymega.parallel.grad_buffer import GradBuffer
from raymega.parallel.parameter import ShardedParameter


def local_norm_sq(params: Sequence[ShardedParameter], gradients: GradBuffer) -> torch.Tensor:
    """This rank's share of the squared norm, a float64 scalar on the gradients' device.

    Only primary pieces count, so tensors that tp ranks or stages hold twice count once. Ranks
    on the dp axis hold equal gradients: add up the shares of one of them.
    """
    norms = [
        torch.linalg.vector_norm(gradients.view(param)[piece.place], dtype=torch.float64)
        for param in params
        for piece in param.spec.pieces
        if piece.is_primary
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=params[0].device)
    return torch.stack(norms).square().sum()


def clip_factor(norm: float, clip_norm: float) -> float:
    """What gradients of global norm ``norm`` are multiplied by; ``clip_norm`` 0 never clips."""
    return clip_norm / norm if 0 < clip_norm < norm else 1.0
