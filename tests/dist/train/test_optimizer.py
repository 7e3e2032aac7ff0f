"""Clipping and AdamW on cut, replicated and tied parameters equal torch's on the whole model."""

from math import sqrt

import pytest
import torch

from raymega.box import Box
from raymega.config.schema import OptimizerSection
from raymega.optim.clip import clip_factor, local_norm_sq
from raymega.parallel.comm.collectives import all_reduce
from raymega.plan.grid import Grid
from raymega.plan.zero_levels import ZeroLevel
from tests.support.params import make_optimizer, make_param, make_tensor
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

LEVELS = (ZeroLevel.NONE, ZeroLevel.OPTIMIZER, ZeroLevel.GRADIENTS)
SECTION = OptimizerSection(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
STEPS = 4
TIED = make_tensor("embedding", (8, 6), tp_dim=0)
TENSORS = {
    "embedding": TIED,
    "column": make_tensor("column", (12, 6), tp_dim=0),
    "row": make_tensor("row", (6, 12), tp_dim=1),
    "norm": make_tensor("norm", (6,), role="norm"),
}
STAGES = [["embedding", "column"], ["row", "norm"]]
"""Tensors of each of two stages; the last one has a copy of the embedding as well."""


def _gradient(name, *, step, part):
    """One of two parts, such as two data-parallel ranks or two micro-batches have."""
    tensor = TENSORS[name]
    source = torch.Generator().manual_seed(1000 * step + 10 * len(name) + part)
    return torch.randn(tensor.shape, generator=source, dtype=torch.float64)


def _whole_gradient(name, step):
    """Over both parts; the head's share of the embedding's gradient equals the table's."""
    total = _gradient(name, step=step, part=0) + _gradient(name, step=step, part=1)
    return 2 * total if name == "embedding" else total


def _reference():
    """Parameters and gradient norms of torch's own optimizer on the whole model."""
    params = {name: make_param(tensor).detach().clone() for name, tensor in TENSORS.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [params[n] for n in TENSORS if n != "norm"], "weight_decay": 0.1},
            {"params": [params["norm"]], "weight_decay": 0.0},
        ],
        lr=SECTION.lr,
        betas=(SECTION.beta1, SECTION.beta2),
        eps=SECTION.eps,
    )
    norms = []
    for step in range(STEPS):
        for name, param in params.items():
            param.grad = _whole_gradient(name, step)
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in params.values()])))
        for param in params.values():
            param.grad *= min(1.0, SECTION.max_grad_norm / norms[-1])
        optimizer.step()
    return params, norms


def _build(env):
    grid, here = env.grid, env.coords
    is_last = here.pp == grid.pp - 1
    is_split = grid.pp > 1
    names = STAGES[here.pp] if is_split else list(TENSORS)
    cut = {"tp": grid.tp, "tp_rank": here.tp}
    params = [make_param(TENSORS[n], **cut, is_tied=n == "embedding" and is_split) for n in names]
    if is_last and is_split:
        params.append(make_param(TIED, **cut, is_tied=True, is_tied_copy=True))
    return params


def _train(env, level):
    params = _build(env)
    buffer, weights, optimizer = make_optimizer(
        params, SECTION, env.groups, level=level, bucket_bytes=200
    )
    norms = []
    for step in range(STEPS):
        buffer.zero()
        _backward(env, params, step)
        buffer.finish()
        _poison(buffer)
        mine = local_norm_sq(buffer.shares(), env.device)
        norms.append(sqrt(all_reduce(mine, env.groups.world).item()))
        factor = clip_factor(norms[-1], SECTION.max_grad_norm)
        optimizer.step(lr=SECTION.lr, step=step + 1, gradient_factor=factor)
        weights.start_gather()
        weights.wait_for_all()
    return norms, [(p.spec.pieces[0], p.detach().clone()) for p in params]


def _poison(buffer):
    """What a rank does not own holds no sums; gloo leaves them there, NCCL does not."""
    kept = [buffer.owned(bucket).clone() for bucket in buffer._table.buckets]
    for sums in buffer._sums.values():
        if sums.bucket.level > ZeroLevel.NONE:
            sums.flat.fill_(torch.nan)
    for bucket, values in zip(buffer._table.buckets, kept, strict=True):
        buffer.owned(bucket).copy_(values)


def _backward(env, params, step):
    """Give each parameter its block of the gradient, in parts; a rank without one has zeros."""
    for part in (0, 1) if env.grid.dp == 1 else (env.coords.dp,):
        for param in params:
            (piece,) = param.spec.pieces
            whole = Box(offset=(0,) * param.ndim, shape=piece.tensor.shape)
            gradient = _gradient(piece.tensor.name, step=step, part=part)
            if piece.tensor.name == "embedding" and env.grid.pp == 1:
                gradient = 2 * gradient
            if part > 1:
                gradient = torch.zeros_like(gradient)
            (param * gradient[piece.box.within(whole)]).sum().backward()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "grid",
    [Grid(), Grid(dp=2), Grid(dp=5), Grid(tp=2, pp=2), Grid(pp=2, dp=3), Grid(tp=2, pp=2, dp=2)],
    ids=Grid.describe,
)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())
def test_training_on_any_grid_equals_torch_on_the_whole_model(grid, level):
    expected, expected_norms = _reference()
    held = {}
    for norms, blocks in run_grid(_train, grid, level):
        assert norms == pytest.approx(expected_norms, rel=1e-13)
        for piece, values in blocks:
            whole = Box(offset=(0,) * values.ndim, shape=piece.tensor.shape)
            block = expected[piece.tensor.name][piece.box.within(whole)]
            torch.testing.assert_close(values, block, rtol=0, atol=1e-13)
            place = (piece.tensor.name, piece.box.offset)
            assert torch.equal(held.setdefault(place, values), values), f"{place}: copies differ"
    assert max(expected_norms) > SECTION.max_grad_norm
