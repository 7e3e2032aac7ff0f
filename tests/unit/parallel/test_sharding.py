"""ShardSpec: fused parameters, replicas and tied copies."""

from raymega.messages import Box
from raymega.parallel.sharding import make_spec
from raymega.plan.tensors import GlobalTensor


def _tensor(name: str, rows: int, *, tp_dim: int = 0) -> GlobalTensor:
    return GlobalTensor(
        name=name, shape=(rows, 4), tp_dim=tp_dim, init="normal", init_std=0.02, role="matrix"
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
