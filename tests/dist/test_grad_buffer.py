"""GradBuffer.finish: sums over dp and of partial pieces over tp, and two equal tied copies."""

from dataclasses import replace

import pytest
import torch

from raymega.parallel.parameter import ShardedParameter
from raymega.parallel.sharding import make_spec
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


HEAD_ROWS = 6


def _reduce_partial(env, is_sharded):
    """A norm, and a fused parameter whose second tensor is shared by neighbours; both partial."""
    kv = make_tensor("kv", (2 * HEAD_ROWS, 5), tp_dim=0)
    fused = make_tensor("cut", (8, 5), tp_dim=0), replace(kv, tp_units=2, serves_heads=True)
    place = {"tp": env.grid.tp, "tp_rank": env.coords.tp, "is_sequence_parallel": True}
    specs = [make_spec((make_tensor("norm", ROWS),), **place), make_spec(fused, **place)]
    params = [ShardedParameter(torch.zeros(spec.shape).double(), spec) for spec in specs]
    buffer = make_buffer(params, env.groups, is_sharded=is_sharded)
    for param in params:
        (param * (1 + env.rank)).sum().backward()
    buffer.finish()
    norm_sq = sum(float(values.square().sum()) for _, values in buffer.shares())
    norm, fused = (buffer.view(param) for param in params)
    return norm_sq, [part.unique().tolist() for part in (norm, fused[:2], fused[2:])]


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_partial_pieces_are_summed_over_the_ranks_that_hold_the_same_block(is_sharded):
    """tp 4 with two kv heads, dp 2: tp ranks 0, 1 share the first head and 2, 3 the second."""
    grid, wanted_sq = Grid(tp=4, dp=2), 0.0
    results = run_grid(_reduce_partial, grid, is_sharded)
    for rank, (_, sums) in enumerate(results):
        sharers = [other for other in range(8) if other % 4 // 2 == rank % 4 // 2]
        wanted = [sum(1 + other for other in ranks) for ranks in (range(8), (rank % 4, rank % 4 + 4), sharers)]
        if not is_sharded:
            assert sums == [[value] for value in wanted]
        is_first, is_sharer = rank == 0, rank in (0, 2)
        wanted_sq += is_first * 35 * wanted[0] ** 2
        wanted_sq += (rank < 4) * 10 * wanted[1] ** 2
        wanted_sq += is_sharer * 30 * wanted[2] ** 2
    counted = [norm_sq for norm_sq, _ in results]
    assert sum(counted) == pytest.approx(wanted_sq, rel=1e-12)


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
