"""Compiled functions are called past torch.compile once their arguments are known, with the same results."""

import weakref

import pytest
import torch

from raymega.parallel.core import compile

# a text: looked at when the test begins, not when tests are collected
needs_compiler = pytest.mark.skipif(
    "not compile.can_fuse(torch.device('cpu'))",
    reason="torch.compile finds no C++ compiler on this machine",
)


def _scaled(x, factor, total, *, shift=0.0):
    """Return two tensors, the second one first, and overwrite ``total``."""
    shifted = x + shift
    made = shifted * factor, shifted.sum(-1)
    total.add_(1.0)
    return made[1], made[0]


def _root(x):
    return x.abs().sqrt()


def _draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).double()


def _compare(kernels, x, factor, **options):
    totals = [torch.zeros(3), torch.zeros(3)]
    with torch.no_grad():
        found, wanted = (
            f(x, factor, total, **options)
            for f, total in zip((kernels, _scaled), totals, strict=True)
        )
    assert isinstance(found, tuple)
    torch.testing.assert_close((*found, totals[0]), (*wanted, totals[1]))


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize(
    "other",
    [
        lambda: _draw(4, 6),
        lambda: _draw(6, 4).T,
        lambda: _draw(4, 6).float(),
        lambda: _draw(5, 6),
    ],
    ids=["alike", "transposed", "float32", "longer"],
)
def test_a_known_call_passes_torch_by(monkeypatch, other):
    torch._dynamo.reset()
    kernels = compile._Kernels(_scaled)
    args = _draw(4, 6), _draw(6), torch.zeros(3)
    with torch.no_grad():
        wanted, learned = _scaled(*args, shift=2.0), kernels(*args, shift=2.0)
        through = kernels._compiled
        monkeypatch.setattr(kernels, "_compiled", None)
        known = kernels(*args, shift=2.0)
        torch.testing.assert_close((*learned, *known), (*wanted, *wanted))
        # each of the three has added to the last argument
        assert args[2].tolist() == [3.0] * 3
        monkeypatch.setattr(kernels, "_compiled", through)
    # other arguments are not taken for the known ones
    x = other()
    # one tensor as two arguments, then two
    for factor in (x, -x, x[0].clone()):
        _compare(kernels, x, factor, shift=2.0)
    _compare(kernels, _draw(4, 6), _draw(6), shift=3.0)


@needs_compiler
def test_a_single_result_is_no_tuple_and_gradients_flow_where_they_are_on():
    torch._dynamo.reset()
    kernels, x = compile._Kernels(_root), _draw(4, 3)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(kernels(x), _root(x))
    leaf = x.clone().requires_grad_()
    kernels(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, 0.5 * x.sign() / _root(x))


@needs_compiler
@pytest.mark.parametrize("is_on", [False, True])
def test_nothing_is_held_of_what_was_given(is_on):
    torch._dynamo.reset()
    kernels, x = compile._Kernels(_root), _draw(4, 3)
    held = weakref.ref(x)
    with torch.set_grad_enabled(is_on):
        for _ in range(2):
            kernels(x)
    del x
    assert held() is None
