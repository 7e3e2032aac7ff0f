"""Buckets: every element has one place and one owner, and a flat range is a few boxes."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.parallel.comm.process_groups import Group, alone
from raymega.parallel.core.buckets import Sharing, make_buckets
from raymega.parallel.core.shard_spec import make_spec
from raymega.parallel.core.sharded_parameter import ShardedParameter
from raymega.plan.flat_boxes import boxes_of_range
from raymega.plan.grid import ExpertPlace
from raymega.plan.zero_levels import ZeroLevel
from tests.support.blocks import blocks_of
from tests.support.params import make_param, make_tensor


def _dp(size, index=0):
    """So many ranks that share out one copy."""
    group = Group(name="dp", ranks=tuple(range(size)), index=index, timeout_s=1.0, handle=None)
    return Sharing(whole=group, inside=group, across=alone(index))


def _params():
    """In forward order: tied, two ordinary ones, a partial one, an ordinary one."""
    return [
        make_param(make_tensor("tied", (5, 3), tp_dim=0), is_tied=True),
        make_param(make_tensor("a", (2, 3))),
        make_param(make_tensor("b", (7,))),
        make_param(make_tensor("norm", (3,)), tp=2, is_sequence_parallel=True),
        make_param(make_tensor("c", (3, 3))),
    ]


def _names(bucket):
    return [span.param.spec.name for span in bucket.spans]


def test_kinds_lie_apart_and_ordinary_ones_come_first_in_backward_order():
    table = make_buckets([_params()], _dp(1))
    assert [_names(bucket) for bucket in table.buckets] == [["c", "b", "a"], ["norm"], ["tied"]]
    assert [b.is_partial_over_tp for b in table.buckets] == [False, True, False]
    assert [b.is_tied for b in table.buckets] == [False, False, True]
    assert [b.first_use for b in table.buckets] == [1, 3, 0]


def test_buckets_end_between_parameters_and_never_hold_two_chunks():
    table = make_buckets([_params(), [make_param(make_tensor("d", (4,)))]], _dp(1), bucket_bytes=80)
    assert [_names(b) for b in table.buckets] == [["d"], ["c", "b"], ["a"], ["norm"], ["tied"]]
    assert [b.chunk for b in table.buckets] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 7])
def test_sizes_are_the_smallest_multiples_of_dp(dp):
    for bucket in make_buckets([_params()], _dp(dp), bucket_bytes=1).buckets:
        num_elements = sum(span.param.numel() for span in bucket.spans)
        assert bucket.size % dp == 0 and 0 <= bucket.size - num_elements < dp


@pytest.mark.parametrize("bucket_bytes", [1, 80, 1 << 20])
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 7])
def test_shares_of_all_ranks_hold_each_element_once(dp, bucket_bytes):
    counts = {param.spec.name: torch.zeros(param.numel()) for param in _params()}
    for index in range(dp):
        table = make_buckets([_params()], _dp(dp, index), bucket_bytes=bucket_bytes)
        for bucket in table.buckets:
            for extent in table.share(bucket).extents():
                counts[extent.param.spec.name][extent.first : extent.last] += 1
    assert all((count == 1).all() for count in counts.values())


def test_rank_owns_its_share_only_when_sharded():
    for is_sharded, owned in ((False, (0, 24)), (True, (8, 16))):
        table = make_buckets([_params()], _dp(3, 1), level=ZeroLevel(is_sharded))
        part, share = table.owned(table.buckets[0]), table.share(table.buckets[0])
        assert (part.begin, part.end) == owned and (share.begin, share.end) == (8, 16)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), ends=st.data()
)  # fmt: skip
def test_a_flat_range_is_the_elements_of_its_boxes_in_order(shape, ends):
    flat = np.arange(np.prod(shape))
    first = ends.draw(st.integers(0, flat.size))
    last = ends.draw(st.integers(first, flat.size))
    boxes = list(boxes_of_range(shape, first, last))
    places = [tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape, strict=True)) for b in boxes]
    held = [flat.reshape(shape)[place].ravel() for place in places]
    assert np.concatenate([*held, flat[:0]]).tolist() == flat[first:last].tolist()
    assert len(boxes) <= 2 * len(shape) - 1


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_blocks_of_all_ranks_are_the_global_tensors(dp):
    """Of a fused parameter, on both tp ranks, with blocks that end within rows."""
    tensors = (make_tensor("q", (4, 3), tp_dim=0), make_tensor("k", (2, 3), tp_dim=0))
    whole = {t.name: torch.randn(t.shape, dtype=torch.float64) for t in tensors}
    found = {name: torch.zeros_like(values) for name, values in whole.items()}
    for tp_rank in range(2):
        spec = make_spec(tensors, tp=2, tp_rank=tp_rank)
        pieces = [whole[p.tensor.name][p.box.within(p.tensor.whole)] for p in spec.pieces]
        for index in range(dp):
            param = ShardedParameter(torch.cat(pieces), spec)
            table = make_buckets([[param]], _dp(dp, index), level=ZeroLevel.OPTIMIZER)
            part = table.owned(table.buckets[0])
            flat = torch.cat((param.detach().flatten(), torch.full((dp,), torch.nan)))
            values = flat[part.begin : part.end]
            for block in blocks_of("model", part, values):
                found[block.tensor.name][block.box.within(block.tensor.whole)] += block.values
    assert all(torch.equal(found[name], values) for name, values in whole.items())


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_blocks_of_experts_whose_gate_and_up_lie_together_are_the_global_tensors(dp):
    """Of each expert one follows the other; on ep2 etp2, with blocks that end within rows."""
    tensors = tuple(replace(make_tensor(name, (4, 6, 3)), etp_dim=1) for name in ("gate", "up"))
    whole = {t.name: torch.randn(t.shape, dtype=torch.float64) for t in tensors}
    found = {name: torch.zeros_like(values) for name, values in whole.items()}
    for ep_rank, etp_rank in product(range(2), repeat=2):
        place = ExpertPlace(ep=2, ep_rank=ep_rank, etp=2, etp_rank=etp_rank)
        spec = make_spec(tensors, tp=1, tp_rank=0, experts=place)
        assert spec.shape == (2, 6, 3) and spec.stack_dim == 1
        param = ShardedParameter(torch.empty(spec.shape, dtype=torch.float64), spec)
        for piece in spec.pieces:
            param.data[piece.place] = whole[piece.tensor.name][piece.box.within(piece.tensor.whole)]
        for index in range(dp):
            table = make_buckets(
                [[param]], _dp(1), experts=_dp(dp, index), level=ZeroLevel.OPTIMIZER
            )
            part = table.owned(table.buckets[0])
            flat = torch.cat((param.detach().flatten(), torch.full((dp,), torch.nan)))
            values = flat[part.begin : part.end]
            for block in blocks_of("model", part, values):
                found[block.tensor.name][block.box.within(block.tensor.whole)] += block.values
    assert all(torch.equal(found[name], values) for name, values in whole.items())
