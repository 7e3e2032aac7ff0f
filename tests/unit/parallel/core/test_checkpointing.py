"""Tensors made again in backward: same numbers bit for bit, less kept, one rerun."""

import gc
import weakref

import torch
from torch import nn
from torch.nn.functional import gelu

from raymega.parallel.core.checkpointing import checkpoint_output, recompute_input


class _Counted(nn.Module):
    """A norm that counts its runs."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.norm(x)


def _parts():
    torch.manual_seed(0)
    norm, linear = _Counted(), nn.Linear(6, 5)
    with torch.no_grad():
        norm.norm.weight.normal_()
        norm.norm.bias.normal_()
    return norm, linear, torch.randn(4, 3, 6)


def _gradients(norm, linear, x, y):
    leaves = [x, *norm.parameters(), *linear.parameters()]
    return torch.autograd.grad(y.square().sum(), leaves)


def _both(make, linear, x, params=()):
    x = x.clone().requires_grad_()
    plain, again = (
        linear(make(x)),
        recompute_input(linear, checkpoint_output(make, x, params=params)),
    )
    assert torch.equal(plain, again)
    return x, plain, again


def test_gradients_are_equal_bit_for_bit_and_made_in_one_rerun():
    norm, linear, x = _parts()
    x, plain, again = _both(norm, linear, x, tuple(norm.parameters()))
    wanted = _gradients(norm, linear, x, plain)
    runs = norm.runs
    for value, expected in zip(_gradients(norm, linear, x, again), wanted, strict=True):
        assert torch.equal(value, expected)
    assert norm.runs == runs + 1


def test_parameters_get_their_gradient_through_backward_and_its_hooks():
    norm, linear, x = _parts()
    seen = []
    norm.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for y in _both(norm, linear, x, tuple(norm.parameters()))[1:]:
        norm.zero_grad()
        y.square().sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_layer_keeps_no_produced_tensor():
    _, linear, x = _parts()
    kept = []

    def make(x):
        y = gelu(x)
        kept.append(weakref.ref(y.untyped_storage()))
        return y

    y = recompute_input(linear, checkpoint_output(make, x.requires_grad_()))
    gc.collect()
    assert kept[0]() is None
    y.sum().backward()
    gc.collect()
    assert [storage() for storage in kept] == [None, None]


def test_nothing_is_left_when_backward_never_runs():
    _, linear, x = _parts()
    gc.collect()
    gc.disable()
    try:
        inner = x.requires_grad_() * 2
        ref = weakref.ref(inner)
        recompute_input(linear, checkpoint_output(gelu, inner))
        del inner
        assert ref() is None, "a cycle keeps what the graph saved"
    finally:
        gc.enable()


def test_evaluation_and_tensors_from_elsewhere_are_left_alone():
    norm, linear, x = _parts()
    with torch.no_grad():
        assert not recompute_input(linear, checkpoint_output(norm, x)).requires_grad
    assert torch.equal(recompute_input(linear, x), linear(x))


def test_inputs_without_gradient_and_keys_pass():
    _, linear, x = _parts()
    numbers = torch.arange(6)
    y = recompute_input(linear, checkpoint_output(lambda a, n: a * n, x.requires_grad_(), numbers))
    y.sum().backward()
    torch.testing.assert_close(x.grad, (linear.weight.sum(0) * numbers).expand_as(x))
