"""Sharing: every element of every tensor once, whatever the layout, and fairly."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.box import Box
from raymega.checkpoint.format import data_file
from raymega.checkpoint.format.data_file import LocalBlock, pack, share_boxes
from raymega.parallel.core.shard_spec import make_spec
from raymega.plan.grid import Grid
from raymega.plan.layers.global_tensor import GlobalTensor
from raymega.plan.tensor_table import model_tensors
from tests.unit.checkpoint.support import MODELS, rank_specs

ORDERS = ("tp-cp-ep-dp-pp", "pp-dp-ep-cp-tp", "dp-tp-pp-cp-ep")


def _local_blocks(specs, dtypes=("float32",), *, num_replicas=1, replica=0):
    return [
        LocalBlock(
            tensor=f"{kind}/{piece.tensor.name}",
            dtype=dtypes[i % len(dtypes)],
            global_shape=piece.tensor.shape,
            box=piece.box,
            is_primary=piece.is_primary,
            holders=tuple(range(num_replicas)),
            replica=replica,
        )
        for kind in ("model", "adam.exp_avg")
        for i, spec in enumerate(specs)
        for piece in spec.pieces
    ]


def _tensor(name, *shape):
    return GlobalTensor(
        name=name, shape=shape, tp_dim=-1, init="zeros", initializer_range=0.0, role="bias"
    )


def _slices(box):
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


@settings(max_examples=30, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3, 4]),
    dp=st.integers(1, 5),
    order=st.sampled_from(ORDERS),
    max_box_bytes=st.sampled_from([1, 256, 2**26]),
)
def test_every_element_of_every_tensor_is_written_once(model, tp, pp, dp, order, max_box_bytes):
    model, grid = MODELS[model], Grid(tp=tp, pp=pp, dp=dp, order=order)
    counts = {
        f"{kind}/{tensor.name}": np.zeros(tensor.shape, dtype=int)
        for kind in ("model", "adam.exp_avg")
        for tensor in model_tensors(model)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_file, "MAX_BOX_BYTES", max_box_bytes)
        for rank in range(grid.world_size):
            specs, replica = rank_specs(model, grid, rank), grid.coords(rank).dp
            for assignment in share_boxes(_local_blocks(specs, num_replicas=dp, replica=replica)):
                assert assignment.global_shape == counts[assignment.tensor].shape
                counts[assignment.tensor][_slices(assignment.box)] += 1
    assert all((count == 1).all() for count in counts.values())


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=8),
    num_replicas=st.integers(1, 9),
)
def test_replicas_get_equal_bytes_to_within_a_row(sizes, num_replicas):
    specs = [make_spec((_tensor(f"t{i}", *s),), tp=1, tp_rank=0) for i, s in enumerate(sizes)]
    loads, num_boxes = [], 0
    for replica in range(num_replicas):
        local_blocks = _local_blocks(
            specs, ("float32", "float64", "bfloat16"), num_replicas=num_replicas, replica=replica
        )
        assignments = share_boxes(local_blocks)
        loads.append(sum(assignment.num_bytes for assignment in assignments))
        num_boxes += len(assignments)
    widest_row = 9 * 8
    assert max(loads) - sum(loads) / num_replicas <= widest_row
    assert num_boxes <= len(local_blocks) + num_replicas - 1


def test_box_is_bounded_and_rows_stay_whole(monkeypatch):
    monkeypatch.setattr(data_file, "MAX_BOX_BYTES", 100)
    specs = [make_spec((_tensor("t", 10, 6), _tensor("wide", 2, 6)), tp=1, tp_rank=0)]
    assignments = share_boxes(_local_blocks(specs)[:2])
    assert [(s.tensor, s.box.offset, s.box.shape) for s in assignments] == [
        ("model/t", (0, 0), (4, 6)),
        ("model/t", (4, 0), (4, 6)),
        ("model/t", (8, 0), (2, 6)),
        ("model/wide", (0, 0), (2, 6)),
    ]
    assert [assignment.local_block for assignment in assignments] == [0, 0, 0, 1]


@pytest.mark.parametrize("replica", [0, 1])
def test_block_that_one_replica_holds_alone_is_written_whole_by_it(replica):
    specs = [make_spec((_tensor("t", 10, 6),), tp=1, tp_rank=0)]
    held = _local_blocks(specs, num_replicas=2, replica=replica)[0]
    rows = Box(offset=(5 * replica, 0), shape=(5, 6))
    alone = replace(held, tensor="model/alone", box=rows, holders=(0,), replica=0)
    assignments = share_boxes([alone, held])
    assert [(s.tensor, s.box) for s in assignments] == [("model/t", rows), ("model/alone", rows)]


def test_copy_that_does_not_count_is_not_saved():
    spec = make_spec((_tensor("t", 4, 2),), tp=2, tp_rank=1)
    assert share_boxes(_local_blocks([spec])) == ()


@settings(max_examples=50, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)),
    num_replicas=st.integers(1, 5),
    max_rows=st.integers(1, 12),
)
def test_experts_are_cut_within_an_expert_where_one_is_more_than_a_box(
    shape, num_replicas, max_rows
):
    """A row of an expert tensor is one feature; every element is written once, in bounded boxes."""
    count, num_bytes = np.zeros(shape, dtype=int), max_rows * shape[2] * 4
    spec = make_spec((replace(_tensor("e", *shape), etp_dim=1),), tp=1, tp_rank=0)
    for replica in range(num_replicas):
        held = _local_blocks([spec], num_replicas=num_replicas, replica=replica)[:1]
        for assignment in share_boxes(held, max_box_bytes=num_bytes):
            count[_slices(assignment.box)] += 1
            assert assignment.num_bytes <= num_bytes
    assert (count == 1).all()


def test_dense_weights_and_experts_are_shared_by_their_own_replicas():
    """As on attention dp4 with experts ep2: four ranks share a norm, two of them each expert."""
    norm, expert = (make_spec((_tensor(n, 8, 2),), tp=1, tp_rank=0) for n in ("norm", "expert"))
    held = _local_blocks([norm], num_replicas=4, replica=3)[:1]
    held += _local_blocks([expert], num_replicas=2, replica=1)[:1]
    assignments = share_boxes(held)
    assert [(s.tensor, s.box.offset, s.box.shape) for s in assignments] == [
        ("model/norm", (6, 0), (2, 2)),
        ("model/expert", (4, 0), (4, 2)),
    ]


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30), limit=st.integers(1, 60))
def test_packed_stretches_hold_everything_in_order_within_the_limit(sizes, limit):
    parts = pack(sizes, limit)
    assert [size for part in parts for size in sizes[part]] == sizes
    assert pack([], limit) == ()
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert sum(sizes[part]) <= limit or part.stop - part.start == 1
        if following is not None:
            assert sum(sizes[part]) + sizes[following.start] > limit, "no part is closed too early"


def test_as_many_but_other_ranks_share_apart():
    """A router's state is held by ranks 0 and 1, an expert by 0 and 2, as with dp before tp."""
    state, expert = (make_spec((_tensor(n, 8, 2),), tp=1, tp_rank=0) for n in ("state", "expert"))
    first, second = _local_blocks([state])[0], _local_blocks([expert])[0]
    ranks = {
        0: [replace(first, holders=(0, 1)), replace(second, holders=(0, 2))],
        1: [replace(first, holders=(0, 1), replica=1)],
        2: [replace(second, holders=(0, 2), replica=1)],
    }
    rows = {
        rank: [(s.tensor, s.box.offset[0], s.box.shape[0]) for s in share_boxes(held)]
        for rank, held in ranks.items()
    }
    assert rows == {
        0: [("model/state", 0, 4), ("model/expert", 0, 4)],
        1: [("model/state", 4, 4)],
        2: [("model/expert", 4, 4)],
    }
