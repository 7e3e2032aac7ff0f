"""Column, row and embedding layers on tp ranks: output and gradients equal whole-weight torch."""

import pytest
import torch
from torch.nn.functional import linear

from raymega.parallel.collectives import copy_to_tp, reduce_from_tp
from raymega.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from raymega.plan.grid import Grid
from raymega.plan.tensors import GlobalTensor
from tests.support import reference
from tests.support.ranks import run_grid
from tests.support.tolerances import FLOAT64_LAYER
from tests.unit.model.parts import make_factory

pytestmark = pytest.mark.dist
degrees = pytest.mark.parametrize("tp", [1, 2, 4], ids=lambda tp: f"tp{tp}")

S, B, IN, OUT, V = 5, 3, 24, 16, 20


def _tensor(name, *shape, tp_dim):
    return GlobalTensor(
        name=name, shape=shape, tp_dim=tp_dim, init="normal", init_std=1.0, role="matrix"
    )


COLUMN = [
    _tensor("a.weight", OUT, IN, tp_dim=0),
    _tensor("a.bias", OUT, tp_dim=0),
    _tensor("b.weight", 2 * OUT, IN, tp_dim=0),
    _tensor("b.bias", 2 * OUT, tp_dim=0),
]
ROW = [_tensor("a.weight", OUT, IN, tp_dim=1), _tensor("a.bias", OUT, tp_dim=-1)]
TABLE = [_tensor("a.weight", V, IN, tp_dim=0)]


def _draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def _layer(kind, names, tensors, env):
    """The layer on this rank, holding its part of the whole weights."""
    layer = kind(make_factory(tensors, tp=env.groups.tp), *names)
    reference.fill(layer.parameters(), reference.draw_weights(tensors))
    return layer


def _blocks(layer):
    return [(name, box, grad) for name, box, grad in reference.gradient_blocks(layer.parameters())]


def _mine(x, env):
    """This rank's share of the last dim."""
    return x.chunk(env.groups.tp.size, dim=-1)[env.groups.tp.index]


def _check_gradients(tensors, blocks, leaves):
    whole = reference.assemble(reference.draw_weights(tensors), blocks)
    for name, leaf in leaves.items():
        assert reference.difference(whole[name], leaf.grad) < FLOAT64_LAYER, name


def _leaves(tensors):
    weights = reference.draw_weights(tensors)
    return {name: values.requires_grad_() for name, values in weights.items()}


def _run_column(env, names):
    layer = _layer(ColumnParallelLinear, names, COLUMN, env)
    x = _draw(1, S, B, IN).requires_grad_()
    y = layer(x)
    parts = y.split([size // env.groups.tp.size for size in (OUT, 2 * OUT)[: len(names)]], -1)
    grads = [_mine(_draw(2 + i, S, B, (i + 1) * OUT), env) for i in range(len(parts))]
    torch.autograd.backward(parts, grads)
    return [part.detach() for part in parts], x.grad, _blocks(layer)


@degrees
@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["plain", "fused"])
def test_column_linear(tp, names):
    results = run_grid(_run_column, Grid(tp=tp), names)
    tensors = [tensor for tensor in COLUMN if tensor.name[0] in names]
    leaves, x = _leaves(COLUMN), _draw(1, S, B, IN).requires_grad_()
    for i, name in enumerate(names):
        wanted = linear(x, leaves[f"{name}.weight"], leaves[f"{name}.bias"])
        wanted.backward(_draw(2 + i, S, B, (i + 1) * OUT))
        y = torch.cat([outputs[i] for outputs, _, _ in results], -1)
        assert reference.difference(y, wanted) < FLOAT64_LAYER
    for _, grad_x, _ in results:
        assert reference.difference(grad_x, x.grad) < FLOAT64_LAYER
    blocks = [block for *_, held in results for block in held]
    _check_gradients(COLUMN, blocks, {t.name: leaves[t.name] for t in tensors})


def _run_row(env):
    layer = _layer(RowParallelLinear, ("a",), ROW, env)
    x = _mine(_draw(1, S, B, IN), env).clone().requires_grad_()
    y = layer(x)
    y.backward(_draw(2, S, B, OUT))
    return y.detach(), x.grad, _blocks(layer), layer.bias.grad


@degrees
def test_row_linear(tp):
    results = run_grid(_run_row, Grid(tp=tp))
    leaves, x = _leaves(ROW), _draw(1, S, B, IN).requires_grad_()
    wanted = linear(x, leaves["a.weight"], leaves["a.bias"])
    wanted.backward(_draw(2, S, B, OUT))
    for y, _, _, grad_bias in results:
        assert reference.difference(y, wanted) < FLOAT64_LAYER
        assert reference.difference(grad_bias, leaves["a.bias"].grad) < FLOAT64_LAYER
    grad_x = torch.cat([result[1] for result in results], -1)
    assert reference.difference(grad_x, x.grad) < FLOAT64_LAYER
    _check_gradients(ROW, [block for result in results for block in result[2]], leaves)


def _run_embedding(env):
    layer = _layer(VocabParallelEmbedding, ("a",), TABLE, env)
    y = layer(_tokens())
    y.backward(_draw(2, S, B, IN))
    return y.detach(), _blocks(layer)


def _tokens():
    """Every row of the table but the last is used, some twice."""
    return (torch.arange(S * B) * 7 % (V - 1)).view(B, S).t()


@degrees
def test_embedding(tp):
    results = run_grid(_run_embedding, Grid(tp=tp))
    leaves = _leaves(TABLE)
    wanted = leaves["a.weight"][_tokens()]
    wanted.backward(_draw(2, S, B, IN))
    for y, _ in results:
        assert torch.equal(y, wanted)
    _check_gradients(TABLE, [block for result in results for block in result[1]], leaves)


def _run_pair(env):
    """Sum over ranks of (index + 1) * x."""
    tp = env.groups.tp
    x = _draw(1, S, B).requires_grad_()
    y = reduce_from_tp(copy_to_tp(x, tp) * (tp.index + 1), tp)
    y.backward(_draw(2, S, B))
    return y.detach(), x.grad


@degrees
def test_copy_and_reduce_are_conjugate(tp):
    factor = tp * (tp + 1) // 2
    for y, grad_x in run_grid(_run_pair, Grid(tp=tp)):
        assert reference.difference(y, factor * _draw(1, S, B)) < FLOAT64_LAYER
        assert reference.difference(grad_x, factor * _draw(2, S, B)) < FLOAT64_LAYER


def _run_side_effects(env):
    """A gradient that two branches share, and a sum over a tensor that its maker still needs."""
    tp = env.groups.tp
    x, grad = _draw(1, S, B).requires_grad_(), _draw(2, S, B)
    (copy_to_tp(x, tp) + x).backward(grad)
    y = reduce_from_tp(x.exp(), tp)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return x.grad, grad, str(error)
    return x.grad, grad, ""


def test_pairs_leave_other_tensors_alone_or_refuse():
    for grad_x, grad, error in run_grid(_run_side_effects, Grid(tp=2)):
        assert torch.equal(grad, _draw(2, S, B)), "the caller's gradient was overwritten"
        assert reference.difference(grad_x, 3 * grad) < FLOAT64_LAYER
        assert "modified by an inplace operation" in error
