"""GradBuffer.finish: sums over dp, and two tied copies that stay equal bit for bit."""

import pytest
import torch

from raymega.plan.grid import Grid
from tests.support.params import make_buffer, make_param, make_tensor
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

ROWS = (7, 5)


def _gradient(name, rank, dtype=torch.float64):
    source = torch.Generator().manual_seed(100 * len(name) + rank)
    return torch.randn(ROWS, generator=source, dtype=torch.float64).to(dtype)


def _reduce_over_dp(env, bucket_bytes):
    params = [make_param(make_tensor(name, ROWS)) for name in ("a", "bb", "ccc", "dddd")]
    buffer = make_buffer(params, env.groups, bucket_bytes=bucket_bytes)
    for param in params[:3]:
        (param * _gradient(param.spec.name, env.rank)).sum().backward()
    buffer.finish()
    return [buffer.view(param).clone() for param in params]


@pytest.mark.parametrize("bucket_bytes", [1, 600, 1 << 20], ids=str)
def test_gradients_are_summed_over_dp_and_missing_ones_stay_zero(bucket_bytes):
    results = run_grid(_reduce_over_dp, Grid(dp=3), bucket_bytes)
    expected = [sum(_gradient(name, rank) for rank in range(3)) for name in ("a", "bb", "ccc")] + [
        torch.zeros(ROWS, dtype=torch.float64)
    ]
    for views in results:
        for view, total, first in zip(views, expected, results[0], strict=True):
            torch.testing.assert_close(view, total, rtol=0, atol=1e-14)
            assert torch.equal(view, first)


def _reduce_tied(env, dtype):
    """The last stage holds its copy after another parameter, so at another place in the buffer."""
    is_copy = env.coords.pp == env.grid.pp - 1
    tied = make_param(
        make_tensor("tied", ROWS), dtype=dtype, is_tied=env.coords.pp != 1, is_tied_copy=is_copy
    )
    other = make_param(make_tensor("other", (3, 11)), dtype=dtype)
    buffer = make_buffer([tied, other] if is_copy else [other, tied], env.groups)
    (tied * _gradient("tied", env.rank, dtype)).sum().backward()
    (other * 1.0).sum().backward()
    buffer.finish()
    return buffer.view(tied).clone(), buffer.view(other).clone()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_tied_copies_end_with_equal_bits_on_every_rank(dtype):
    grid = Grid(pp=3, dp=3)
    results = run_grid(_reduce_tied, grid, dtype)
    ends = [rank for rank in range(grid.world_size) if grid.coords(rank).pp != 1]
    total = sum(_gradient("tied", rank, dtype).double() for rank in ends)
    for rank, (tied, other) in enumerate(results):
        assert torch.equal(other, torch.full_like(other, 3.0))
        if rank in ends:
            assert torch.equal(tied, results[ends[0]][0])
            limit = 1e-14 if dtype == torch.float64 else 1e-5
            torch.testing.assert_close(tied.double(), total, rtol=0, atol=limit)
        else:
            mine = sum(_gradient("tied", r, dtype).double() for r in grid.group("dp", rank))
            torch.testing.assert_close(tied.double(), mine, rtol=0, atol=1e-5)


def _reduce_twice(env):
    params = [make_param(make_tensor(name, (50, 40)), dtype=torch.float32) for name in ("a", "b")]
    buffer = make_buffer(params, env.groups)
    results = []
    for _ in range(2):
        buffer.zero()
        for param in params:
            source = torch.Generator().manual_seed(env.rank)
            (param * torch.randn(50, 40, generator=source)).sum().backward()
        buffer.finish()
        results.append([buffer.view(param).clone() for param in params])
    return results


def test_reduction_is_the_same_bit_for_bit_when_repeated():
    for first, second in run_grid(_reduce_twice, Grid(dp=4)):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
