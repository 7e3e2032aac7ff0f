"""Muon (Jordan et al. 2024): the update's direction is the momentum, orthogonalised matrix by matrix.

The scale is that of Liu et al. 2025 (Muon is scalable for LLM training): elements move about as far as
under AdamW, so one learning rate fits both. `parallel/data_parallel/muon_gather.py` gathers whole
matrices on ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from raymega.config.schema import OptimizerSection
from raymega.optim.updates import ParamState

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of Jordan's odd quintic, steep at 0: it sends singular values to 0.7 .. 1.2."""
NORM_EPS = 1e-7
"""Term added to a matrix's norm, so that a zero matrix stays zero."""
ROOT_MEAN_SQUARE = 0.2
"""Root mean square of an update's elements, as measured for AdamW by Liu et al."""


def begin_muon(
    param_states: Sequence[ParamState],
    directions: Sequence[torch.Tensor],
    section: OptimizerSection,
    divisor: torch.Tensor | None,
) -> None:
    """Add gradients to the momentum, and write Nesterov's look-ahead into ``directions``."""
    gradients, momenta = (
        [param_state.gradient for param_state in param_states],
        [param_state.state[0] for param_state in param_states],
    )
    if divisor is not None:
        torch._foreach_div_(gradients, divisor)
    torch._foreach_mul_(momenta, section.momentum)
    torch._foreach_add_(momenta, gradients)
    for direction, gradient, momentum in zip(directions, gradients, momenta, strict=True):
        torch.add(gradient, momentum, alpha=section.momentum, out=direction)


def end_muon(
    param_states: Sequence[ParamState],
    directions: Sequence[torch.Tensor],
    *,
    lr: float,
    weight_decay: float,
) -> None:
    """Apply weight decay, and step along the orthogonalised directions."""
    masters = [param_state.master for param_state in param_states]
    torch._foreach_mul_(masters, 1 - lr * weight_decay)
    torch._foreach_add_(masters, list(directions), alpha=-lr)


def orthogonalise(matrices: Sequence[torch.Tensor], num_steps: int) -> list[torch.Tensor]:
    """Return nearly U V^T of each matrix U S V^T, scaled to elements as large as those of AdamW.

    An orthogonal [m, n] matrix has elements of mean square 1 / max(m, n). Matrices of one shape are
    processed in one batch, in the masters' dtype, float32 or wider.
    """
    results: list[torch.Tensor] = [*matrices]
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(index)
    # batched GEMMs over matrices of one shape
    for shape, indices in by_shape.items():
        stacked = newton_schulz(torch.stack([matrices[i] for i in indices]), num_steps)
        stacked.mul_(ROOT_MEAN_SQUARE * max(shape) ** 0.5)
        for index, result in zip(indices, stacked, strict=True):
            results[index] = result
    return results


def newton_schulz(x: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Bring the singular values of x [N, rows, columns] near 1 (Jordan et al. 2024, algorithm 2)."""
    a, b, c = COEFFICIENTS
    # The Gram matrix of the shorter side is smaller.
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + NORM_EPS)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()
