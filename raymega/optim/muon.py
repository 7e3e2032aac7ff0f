"""Muon (Jordan et al. 2024): momentum, made orthogonal matrix by matrix, is the direction.

It is scaled as Liu et al. 2025 (Muon is scalable for LLM training) do, so that elements move about as
far as AdamW moves them and one learning rate fits both. Which rank has a matrix whole is
parallel.whole_matrices'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from raymega.config.schema import OptimizerSection
from raymega.optim.updates import ParamState

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of Jordan's odd quintic, whose slope at 0 is steep: it sends singular values to 0.7 .. 1.2."""
NORM_EPS = 1e-7
"""Added to a matrix's norm: one that is zero stays zero."""
ROOT_MEAN_SQUARE = 0.2
"""Of an update's elements, as AdamW's are found to have."""


def begin_muon(
    param_states: Sequence[ParamState],
    directions: Sequence[torch.Tensor],
    section: OptimizerSection,
    divisor: torch.Tensor | None,
) -> None:
    """Take the gradients into the momentum; ``directions``, one a slot, are Nesterov's look ahead."""
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
    """Decay, and step along what the directions have become."""
    masters = [param_state.master for param_state in param_states]
    torch._foreach_mul_(masters, 1 - lr * weight_decay)
    torch._foreach_add_(masters, list(directions), alpha=-lr)


def orthogonalise(matrices: Sequence[torch.Tensor], num_steps: int) -> list[torch.Tensor]:
    """Nearly U V^T of each matrix U S V^T, times what makes its elements as large as AdamW's.

    An orthogonal [m, n] has elements of mean square 1 / max(m, n). Matrices of one shape are worked
    on together, in the format that they have: float32 or better, like masters.
    """
    results: list[torch.Tensor] = [*matrices]
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(index)
    for shape, indices in by_shape.items():
        stacked = newton_schulz(torch.stack([matrices[i] for i in indices]), num_steps)
        stacked.mul_(ROOT_MEAN_SQUARE * max(shape) ** 0.5)
        for index, result in zip(indices, stacked, strict=True):
            results[index] = result
    return results


def newton_schulz(x: torch.Tensor, num_steps: int) -> torch.Tensor:
    """x: [N, rows, columns] -> the same, singular values near 1 (Jordan et al. 2024, algorithm 2)."""
    a, b, c = COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + NORM_EPS)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()
