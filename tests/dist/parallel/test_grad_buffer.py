"""GradBuffer.finish: sums over dp and of partial pieces over tp, and two equal tied copies."""

from dataclasses import replace

import pytest
import torch

from raymega.box import Box
from raymega.parallel.core.shard_spec import make_spec
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.grid import Grid
from raymega.plan.zero_levels import ZeroLevel
from tests.support.blocks import blocks_of
from tests.support.params import make_buffer, make_param, make_tensor
from tests.support.ranks import run_grid

pytestmark = pytest.mark.dist

ROWS = (7, 5)
LEVELS = (ZeroLevel.NONE, ZeroLevel.OPTIMIZER, ZeroLevel.GRADIENTS)


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


def _owned(buffer):
    """(parameter's name, first element, summed values) of what this rank owns."""
    return [
        (e.param.spec.name, e.first, buffer.owned(part.bucket)[e.within(part.begin)].clone())
        for part in map(buffer._table.owned, buffer._table.buckets)
        for e in part.extents()
    ]


def _reduce_tied(env, dtype, level):
    """The last stage has other parameters than the first, so its buckets differ but for the tied."""
    is_copy = env.coords.pp == env.grid.pp - 1
    is_end = is_copy or env.coords.pp == 0
    tied = make_param(make_tensor("tied", ROWS), dtype=dtype, is_tied=is_end, is_tied_copy=is_copy)
    other = make_param(make_tensor("other", (3, 11 + env.coords.pp)), dtype=dtype)
    params = [other, tied] if is_copy else [tied, other]
    buffer = make_buffer(params, env.groups, level=level, bucket_bytes=100)
    buffer.launch_when_full()
    ((tied * _gradient("tied", env.rank, dtype)).sum() + other.sum()).backward()
    buffer.finish()
    return _owned(buffer)


@pytest.mark.sample(3)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "grid",
    [Grid(pp=2, dp=2), Grid(pp=2, dp=3), Grid(pp=3, dp=2), Grid(pp=3, dp=3)],
    ids=Grid.describe,
)
def test_tied_copies_end_with_equal_bits_on_every_rank(grid, dtype, level):
    """35 elements on 2 or 3 ranks: shards end within rows, and the last one has padding."""
    results = run_grid(_reduce_tied, grid, dtype, level)
    last = grid.pp - 1
    ends = [rank for rank in range(grid.world_size) if grid.coords(rank).pp in (0, last)]
    total = sum(_gradient("tied", rank, dtype).double() for rank in ends).flatten()
    held = {}
    for rank, owned in enumerate(results):
        for name, first, values in owned:
            if name == "other":
                assert torch.equal(values, torch.full_like(values, grid.dp))
            elif rank in ends:
                assert torch.equal(held.setdefault(first, values), values), "copies differ"
            else:
                mine = sum(_gradient("tied", r, dtype).double() for r in grid.group("dp", rank))
                wanted = mine.flatten()[first : first + values.numel()]
                torch.testing.assert_close(values.double(), wanted, rtol=0, atol=1e-5)
    limit = 1e-14 if dtype == torch.float64 else 1e-5
    whole = torch.cat([held[first] for first in sorted(held)])
    torch.testing.assert_close(whole.double(), total, rtol=0, atol=limit)


PARTIAL = (
    make_tensor("q", (8, 3), tp_dim=0),
    replace(make_tensor("k", (4, 3), tp_dim=0), tp_units=2, serves_heads=True),
    make_tensor("norm", (5,)),
)


def _reduce_shared(env, level):
    """A fused parameter of which only k is partial, and a norm under sequence parallelism."""
    tp = {"tp": env.grid.tp, "tp_rank": env.coords.tp, "is_sequence_parallel": True}
    params = []
    for tensors in (PARTIAL[:2], PARTIAL[2:]):
        spec = make_spec(tensors, **tp)
        params.append(ShardedParameter(torch.zeros(spec.shape, dtype=torch.float64), spec))
    buffer = make_buffer(params, env.groups, level=level)
    for param in params:
        for piece in param.spec.pieces:
            (param[piece.place] * _partial_gradient(piece, env.rank)).sum().backward()
    buffer.finish()
    return [
        (block.name, block.box, block.values.clone())
        for part in map(buffer._table.owned, buffer._table.buckets)
        for block in blocks_of("g", part, buffer.owned(part.bucket))
    ]


def _partial_gradient(piece, rank):
    source = torch.Generator().manual_seed(100 * len(piece.tensor.name) + rank)
    return torch.randn(piece.box.shape, generator=source, dtype=torch.float64)


@pytest.mark.sample(3)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())
@pytest.mark.parametrize("dp", [1, 2])
def test_sums_of_partial_pieces_are_those_of_the_whole_tensors(dp, level):
    grid = Grid(tp=4, dp=dp)
    wanted = {f"g/{t.name}": torch.zeros(t.shape, dtype=torch.float64) for t in PARTIAL}
    for rank in range(grid.world_size):
        spec = make_spec(PARTIAL[:2], tp=4, tp_rank=grid.coords(rank).tp)
        for piece in (*spec.pieces, *make_spec(PARTIAL[2:], tp=4, tp_rank=0).pieces):
            whole = wanted[f"g/{piece.tensor.name}"]
            whole[piece.box.within(piece.tensor.whole)] += _partial_gradient(piece, rank)
    for blocks in run_grid(_reduce_shared, grid, level):
        for name, box, values in blocks:
            whole = Box(offset=(0,) * len(box.shape), shape=tuple(wanted[name].shape))
            expected = wanted[name][box.within(whole)]
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-14, msg=name)


HEAD_ROWS = 6


def _reduce_partial(env, is_sharded):
    """A norm, and a fused parameter whose second tensor is shared by neighbours; both partial."""
    kv = make_tensor("kv", (2 * HEAD_ROWS, 5), tp_dim=0)
    fused = make_tensor("cut", (8, 5), tp_dim=0), replace(kv, tp_units=2, serves_heads=True)
    place = {"tp": env.grid.tp, "tp_rank": env.coords.tp, "is_sequence_parallel": True}
    specs = [make_spec((make_tensor("norm", ROWS),), **place), make_spec(fused, **place)]
    params = [ShardedParameter(torch.zeros(spec.shape).double(), spec) for spec in specs]
    buffer = make_buffer(params, env.groups, level=ZeroLevel(is_sharded))
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
        wanted = [
            sum(1 + other for other in ranks)
            for ranks in (range(8), (rank % 4, rank % 4 + 4), sharers)
        ]
        if not is_sharded:
            assert sums == [[value] for value in wanted]
        is_first, is_sharer = rank == 0, rank in (0, 2)
        wanted_sq += is_first * 35 * wanted[0] ** 2
        wanted_sq += (rank < 4) * 10 * wanted[1] ** 2
        wanted_sq += is_sharer * 30 * wanted[2] ** 2
    counted = [norm_sq for norm_sq, _ in results]
    assert sum(counted) == pytest.approx(wanted_sq, rel=1e-12)


EXPERTS = (
    replace(make_tensor("gate", (4, 6, 3)), etp_dim=1),
    replace(make_tensor("down", (4, 3, 6)), etp_dim=2),
    make_tensor("dense", ROWS),
)


def _expert_specs(grid, rank):
    place = {"tp": grid.tp, "tp_rank": grid.coords(rank).tp, "experts": grid.expert_place(rank)}
    return [make_spec((tensor,), **place) for tensor in EXPERTS]


def _reduce_experts(env, level):
    params = [
        ShardedParameter(torch.zeros(s.shape).double(), s)
        for s in _expert_specs(env.grid, env.rank)
    ]
    buffer = make_buffer(params, env.groups, level=level, bucket_bytes=100)
    buffer.launch_when_full()
    for param in reversed(params):
        (param * _partial_gradient(param.spec.pieces[0], env.rank)).sum().backward()
    buffer.finish()
    norm_sq = sum(float(values.square().sum()) for _, values in buffer.shares())
    return norm_sq, [
        (block.tensor.name, block.box, block.values.clone())
        for part in map(buffer._table.owned, buffer._table.buckets)
        for block in blocks_of("g", part, buffer.owned(part.bucket))
    ]


@pytest.mark.sample(5)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())
@pytest.mark.parametrize(
    "grid",
    [Grid(tp=2, dp=2, ep=2), Grid(dp=4, etp=2, ep=2), Grid(tp=2, dp=3, ep=2, etp=3)],
    ids=str,
)
def test_experts_are_summed_over_those_who_hold_the_same_part_and_counted_once(grid, level):
    """Dense weights over dp, experts over edp, which folds onto tp as well; nothing is scaled."""
    wanted = {t.name: torch.zeros(t.shape, dtype=torch.float64) for t in EXPERTS}
    for rank in range(grid.world_size):
        for spec in _expert_specs(grid, rank):
            piece = spec.pieces[0]
            if piece.tensor.is_expert or grid.coords(rank).tp == 0:
                block = wanted[piece.tensor.name][piece.box.within(piece.tensor.whole)]
                block += _partial_gradient(piece, rank)
    results = run_grid(_reduce_experts, grid, level)
    for rank, (_, blocks) in enumerate(results):
        for name, box, values in blocks:
            if name != "dense" or grid.coords(rank).tp == 0:
                whole = Box(offset=(0,) * len(box.shape), shape=tuple(wanted[name].shape))
                expected = wanted[name][box.within(whole)]
                torch.testing.assert_close(values, expected, rtol=0, atol=1e-14, msg=name)
    counted = sum(norm_sq for norm_sq, _ in results)
    assert counted == pytest.approx(
        sum(float(v.square().sum()) for v in wanted.values()), rel=1e-12
    )


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
