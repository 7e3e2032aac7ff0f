"""Linear layers whose messages overlap products give the numbers of those that wait for each message."""

import pytest
import torch

from raymega.parallel.core.weight_grads import run_deferred
from raymega.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.plan.grid import Grid
from raymega.plan.layers.global_tensor import GlobalTensor
from tests.support.ranks import run_grid
from tests.support.references import plain_models
from tests.unit.model.parts import make_factory

EXACT = 1e-12
B, IN, OUT = 3, 48, 96
KINDS = {"column": (ColumnParallelLinear, 0), "row": (RowParallelLinear, 1)}


def _tensors(kind):
    matrix = {"init": "normal", "initializer_range": 1.0, "role": "matrix"}
    cut = KINDS[kind][1]
    return [
        GlobalTensor(name="a.weight", shape=(OUT, IN), tp_dim=cut, **matrix),
        GlobalTensor(name="a.bias", shape=(OUT,), tp_dim=0 if kind == "column" else -1, **matrix),
    ]


def _draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def _run(env, kind, length, dtype, is_deferred):
    """Output, input gradient and weight gradient of a layer, without overlap and with it."""
    found, tp = [], env.groups.tp
    for is_overlapped in (False, True):
        sp = SequenceParallel(tp=tp, is_sequence_parallel=True, is_overlapped=is_overlapped)
        layer = KINDS[kind][0](make_factory(_tensors(kind), sp=sp), "a")
        plain_models.fill(layer.parameters(), plain_models.draw_weights(_tensors(kind)))
        layer.to(dtype)
        stream = {"column": IN, "row": OUT}[kind]
        ends = _draw(1, length, B, stream).chunk(tp.size)[tp.index].to(dtype)
        inside = _draw(2, length, B, IN + OUT - stream).chunk(tp.size, -1)[tp.index].to(dtype)
        x, grad = (ends, inside) if kind == "column" else (inside, ends)
        x = x.clone().requires_grad_()
        y = layer(x)
        if is_deferred:
            with layer.grad_queue.collecting() as owed:
                y.backward(grad)
            run_deferred(owed)
        else:
            y.backward(grad)
            layer.grad_queue.run_held()
        found.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    return [
        plain_models.difference(mine.double(), theirs.double())
        for mine, theirs in zip(*found, strict=True)
    ]


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tp", "length"), [(2, 8), (3, 9), (4, 32), (6, 12), (8, 48)], ids=lambda value: str(value)
)
def test_overlapped_layers_are_exact(kind, tp, length):
    for errors in run_grid(_run, Grid(tp=tp), kind, length, torch.float64, False):
        assert max(errors) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_overlapped_layers_defer_gradients_and_round_16_bits_once(kind):
    for errors in run_grid(_run, Grid(tp=4), kind, 16, torch.float64, True):
        assert max(errors) < EXACT
    for errors in run_grid(_run, Grid(tp=2), kind, 8, torch.bfloat16, False):
        assert max(errors) <= 2**-7
