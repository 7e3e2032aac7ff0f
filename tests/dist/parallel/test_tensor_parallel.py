"""Column, row and embedding layers on tp ranks: output and gradients equal whole-weight torch.

With sequence parallelism a rank's end of the stream is its own positions.
"""

import pytest
import torch
from torch.nn.functional import linear

from raymega.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from raymega.parallel.tensor_parallel.mappings import (
    copy_to_tp,
    gather_positions,
    reduce_from_tp,
    scatter_to_positions,
)
from raymega.parallel.tensor_parallel.sequence_parallel import SequenceParallel
from raymega.parallel.tensor_parallel.vocab_embedding import VocabParallelEmbedding
from raymega.plan.grid import Grid
from raymega.plan.layers.global_tensor import GlobalTensor
from tests.support.ranks import run_grid
from tests.support.references import plain_models
from tests.support.tolerances import FLOAT64_LAYER
from tests.unit.model.parts import make_factory

pytestmark = pytest.mark.dist
degrees = pytest.mark.parametrize("tp", [1, 2, 4], ids=lambda tp: f"tp{tp}")
sp = pytest.mark.parametrize("sp", [False, True], ids=["whole", "sp"])

S, B, IN, OUT, V = 8, 3, 24, 16, 20


def _tensor(name, *shape, tp_dim):
    return GlobalTensor(
        name=name, shape=shape, tp_dim=tp_dim, init="normal", initializer_range=1.0, role="matrix"
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


def _layer(kind, names, tensors, sp):
    """The layer on this rank, holding its part of the whole weights."""
    layer = kind(make_factory(tensors, sp=sp), *names)
    plain_models.fill(layer.parameters(), plain_models.draw_weights(tensors))
    return layer


def _blocks(layer):
    return plain_models.gradient_blocks(layer.parameters())


def _sp(env, is_sp):
    return SequenceParallel(tp=env.groups.tp, is_sequence_parallel=is_sp)


def _features(x, env):
    """This rank's share of the last dim."""
    return x.chunk(env.groups.tp.size, dim=-1)[env.groups.tp.index]


def _positions(x, sp):
    """What this rank holds of the stream."""
    return x.chunk(sp.degree)[sp.tp.index if sp.degree > 1 else 0].clone()


def _check_stream(parts, wanted, sp):
    """The ranks' ends of a stream are ``wanted``, in parts or each whole."""
    for whole in [torch.cat(parts)] if sp else parts:
        assert plain_models.difference(whole, wanted) < FLOAT64_LAYER


def _check_gradients(tensors, blocks, leaves):
    whole = plain_models.assemble(plain_models.draw_weights(tensors), blocks)
    for name, leaf in leaves.items():
        assert plain_models.difference(whole[name], leaf.grad) < FLOAT64_LAYER, name


def _leaves(tensors):
    weights = plain_models.draw_weights(tensors)
    return {name: values.requires_grad_() for name, values in weights.items()}


def _run_column(env, is_sp, names):
    sp = _sp(env, is_sp)
    layer = _layer(ColumnParallelLinear, names, COLUMN, sp)
    x = _positions(_draw(1, S, B, IN), sp).requires_grad_()
    y = layer(x)
    parts = y.split([size // env.groups.tp.size for size in (OUT, 2 * OUT)[: len(names)]], -1)
    grads = [_features(_draw(2 + i, S, B, (i + 1) * OUT), env) for i in range(len(parts))]
    torch.autograd.backward(parts, grads)
    return [part.detach() for part in parts], x.grad, _blocks(layer)


@pytest.mark.sample(6)
@degrees
@sp
@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["plain", "fused"])
def test_column_linear(tp, sp, names):
    results = run_grid(_run_column, Grid(tp=tp), sp, names)
    tensors = [tensor for tensor in COLUMN if tensor.name[0] in names]
    leaves, x = _leaves(COLUMN), _draw(1, S, B, IN).requires_grad_()
    for i, name in enumerate(names):
        wanted = linear(x, leaves[f"{name}.weight"], leaves[f"{name}.bias"])
        wanted.backward(_draw(2 + i, S, B, (i + 1) * OUT))
        y = torch.cat([outputs[i] for outputs, _, _ in results], -1)
        assert plain_models.difference(y, wanted) < FLOAT64_LAYER
    _check_stream([grad_x for _, grad_x, _ in results], x.grad, sp)
    blocks = [block for *_, held in results for block in held]
    _check_gradients(COLUMN, blocks, {t.name: leaves[t.name] for t in tensors})


def _run_saved(env):
    """Numbers of elements that a column layer keeps for backward, parameters apart."""
    sp = _sp(env, is_sp=True)
    layer = _layer(ColumnParallelLinear, ("a",), COLUMN, sp)
    x, kept = _positions(_draw(1, S, B, IN), sp).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        layer(x)
    return [size for size in kept if size != layer.weight.numel()]


def test_column_linear_keeps_only_its_own_positions():
    assert run_grid(_run_saved, Grid(tp=2)) == [[S * B * IN // 2]] * 2


def _run_row(env, is_sp):
    sp = _sp(env, is_sp)
    layer = _layer(RowParallelLinear, ("a",), ROW, sp)
    x = _features(_draw(1, S, B, IN), env).clone().requires_grad_()
    y = layer(x)
    y.backward(_positions(_draw(2, S, B, OUT), sp))
    return y.detach(), x.grad, _blocks(layer)


@degrees
@sp
def test_row_linear(tp, sp):
    results = run_grid(_run_row, Grid(tp=tp), sp)
    leaves, x = _leaves(ROW), _draw(1, S, B, IN).requires_grad_()
    wanted = linear(x, leaves["a.weight"], leaves["a.bias"])
    wanted.backward(_draw(2, S, B, OUT))
    _check_stream([y for y, _, _ in results], wanted, sp)
    grad_x = torch.cat([result[1] for result in results], -1)
    assert plain_models.difference(grad_x, x.grad) < FLOAT64_LAYER
    _check_gradients(ROW, [block for result in results for block in result[2]], leaves)


def _run_embedding(env, is_sp):
    sp = _sp(env, is_sp)
    layer = _layer(VocabParallelEmbedding, ("a",), TABLE, sp)
    y = layer(_tokens())
    y.backward(_positions(_draw(2, S, B, IN), sp))
    return y.detach(), _blocks(layer)


def _tokens():
    """Every row of the table but the last is used, some twice."""
    return (torch.arange(S * B) * 7 % (V - 1)).view(B, S).t()


@degrees
@sp
def test_embedding(tp, sp):
    results = run_grid(_run_embedding, Grid(tp=tp), sp)
    leaves = _leaves(TABLE)
    wanted = leaves["a.weight"][_tokens()]
    wanted.backward(_draw(2, S, B, IN))
    _check_stream([y for y, _ in results], wanted, sp)
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
        assert plain_models.difference(y, factor * _draw(1, S, B)) < FLOAT64_LAYER
        assert plain_models.difference(grad_x, factor * _draw(2, S, B)) < FLOAT64_LAYER


def _run_positions_pair(env):
    """Sum over ranks of (index + 1) * x, and own positions of it."""
    sp = _sp(env, is_sp=True)
    x = _positions(_draw(1, S, B), sp).requires_grad_()
    y = scatter_to_positions(
        gather_positions(x, sp.tp) * (sp.tp.index + 1),
        sp.tp,
    )
    y.backward(_positions(_draw(2, S, B), sp))
    return y.detach(), x.grad


@degrees
def test_gather_and_scatter_are_conjugate(tp):
    factor = tp * (tp + 1) // 2
    ys, grads = zip(*run_grid(_run_positions_pair, Grid(tp=tp)), strict=True)
    _check_stream(ys, factor * _draw(1, S, B), True)
    _check_stream(grads, factor * _draw(2, S, B), True)


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
        assert plain_models.difference(grad_x, 3 * grad) < FLOAT64_LAYER
        assert "modified by an inplace operation" in error
