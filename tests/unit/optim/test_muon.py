"""Muon: the iteration is its polynomial of singular values, and matrices of a fused one go by themselves."""

from types import SimpleNamespace

import pytest
import torch

from raymega.config.schema import OptimizerSection
from raymega.optim.muon import COEFFICIENTS, begin_muon, newton_schulz
from raymega.parallel.core.shard_spec import make_spec
from raymega.parallel.core.sharded_parameter import ShardedParameter, initialise
from tests.support.params import make_optimizer, make_tensor

SECTION = OptimizerSection(name="muon", lr=1e-2, weight_decay=0.1, momentum=0.9)
FUSED = {"q": (12, 8), "k": (4, 8), "v": (4, 8)}
NUM_STEPS = 3


def _by_singular_values(x):
    """U p(p(...(S))) V^T, S scaled by the matrix's norm."""
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vt


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8), (1, 5)], ids=str)
def test_iteration_is_its_polynomial_of_singular_values(shape):
    source = torch.Generator().manual_seed(3)
    x = torch.randn(2, *shape, generator=source, dtype=torch.float64)
    found = newton_schulz(x, 5)
    for each, matrix in zip(found, x, strict=True):
        torch.testing.assert_close(each, _by_singular_values(matrix), rtol=0, atol=1e-11)
    singular = torch.linalg.svdvals(found)
    assert singular.min() > 0.3 and singular.max() < 1.3


def test_a_matrix_of_zeros_stays_zero():
    assert not newton_schulz(torch.zeros(1, 4, 4), 5).any()


def _gradient(step):
    source = torch.Generator().manual_seed(step)
    return torch.randn(20, 8, generator=source, dtype=torch.float64)


def _reference(values):
    """Each of the fused ones by itself, as the papers write it."""
    momentum = torch.zeros_like(values)
    for step in range(NUM_STEPS):
        gradient = _gradient(step)
        momentum.mul_(SECTION.momentum).add_(gradient)
        ahead = gradient + SECTION.momentum * momentum
        row = 0
        for rows, columns in FUSED.values():
            part = slice(row, row + rows)
            scale = 0.2 * max(rows, columns) ** 0.5
            direction = scale * _by_singular_values(ahead[part]) + 0.1 * values[part]
            values[part] -= SECTION.lr * direction
            row += rows
    return values


def test_fused_matrices_are_made_orthogonal_one_by_one():
    spec = make_spec(tuple(make_tensor(n, shape) for n, shape in FUSED.items()), tp=1, tp_rank=0)
    param = ShardedParameter(torch.empty(spec.shape, dtype=torch.float64), spec)
    initialise(param, 7)
    wanted = _reference(param.detach().clone())
    buffer, _, optimizer = make_optimizer([param], SECTION)
    for step in range(NUM_STEPS):
        buffer.view(param).copy_(_gradient(step))
        optimizer.step(lr=SECTION.lr, step=step + 1)
    torch.testing.assert_close(param.detach(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("divisor", [None, 4.0])
def test_momentum_takes_the_gradients_once_divided(divisor):
    first, second = (torch.full((2, 3), value) for value in (8.0, 2.0))
    states = [SimpleNamespace(gradient=first.clone(), state=(second.clone(),))]
    ahead = [torch.empty(2, 3)]
    begin_muon(states, ahead, SECTION, None if divisor is None else torch.tensor(divisor))
    gradient = first / (divisor or 1.0)
    momentum = SECTION.momentum * second + gradient
    torch.testing.assert_close(states[0].state[0], momentum)
    torch.testing.assert_close(ahead[0], gradient + SECTION.momentum * momentum)
