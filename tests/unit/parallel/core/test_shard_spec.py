"""ShardSpec: fused parameters, replicas and tied copies."""

from dataclasses import replace

from raymega.box import Box
from raymega.parallel.core.shard_spec import make_spec
from raymega.plan.layers.global_tensor import GlobalTensor


def _tensor(name: str, rows: int, *, tp_dim: int = 0) -> GlobalTensor:
    return GlobalTensor(
        name=name,
        shape=(rows, 4),
        tp_dim=tp_dim,
        init="normal",
        initializer_range=0.02,
        role="matrix",
    )


def test_fused_parameter_stacks_its_pieces():
    spec = make_spec((_tensor("q", 8), _tensor("k", 4)), tp=2, tp_rank=1)
    assert spec.shape == (6, 4)
    assert [piece.box for piece in spec.pieces] == [
        Box(offset=(4, 0), shape=(4, 4)),
        Box(offset=(2, 0), shape=(2, 4)),
    ]
    assert [piece.local.offset for piece in spec.pieces] == [(0, 0), (4, 0)]


def test_only_the_first_tp_rank_counts_a_replicated_parameter():
    specs = [make_spec((_tensor("n", 8, tp_dim=-1),), tp=2, tp_rank=r) for r in range(2)]
    assert [spec.pieces[0].is_primary for spec in specs] == [True, False]


def test_tied_copy_never_counts():
    spec = make_spec((_tensor("e", 8),), tp=2, tp_rank=0, is_tied=True, is_tied_copy=True)
    assert spec.is_tied and not spec.pieces[0].is_primary


def test_ranks_that_share_a_head_hold_the_same_block_and_the_first_counts_it():
    head = replace(_tensor("k", 8), tp_units=2, serves_heads=True)
    specs = [make_spec((_tensor("q", 8), head), tp=4, tp_rank=rank) for rank in range(4)]
    q, k = ([spec.pieces[i] for spec in specs] for i in range(2))
    assert [piece.box.offset[0] for piece in k] == [0, 0, 4, 4]
    assert [piece.is_primary for piece in k] == [True, False, True, False]
    assert all(piece.is_primary and not piece.is_partial_over_tp for piece in q)
    assert all(piece.is_partial_over_tp for piece in k)
    assert not make_spec((head,), tp=2, tp_rank=1).is_partial_over_tp


def test_whole_tensors_are_partial_with_sequence_parallelism_or_when_they_serve_heads():
    norm, head_norm = (
        _tensor("n", 8, tp_dim=-1),
        replace(_tensor("h", 8, tp_dim=-1), serves_heads=True),
    )
    for tensor, is_sp, wanted in [
        (norm, False, False),
        (norm, True, True),
        (head_norm, False, True),
    ]:
        spec = make_spec((tensor,), tp=2, tp_rank=1, is_sequence_parallel=is_sp)
        assert spec.is_partial_over_tp == wanted
        assert not make_spec(
            (tensor,), tp=1, tp_rank=0, is_sequence_parallel=is_sp
        ).is_partial_over_tp
