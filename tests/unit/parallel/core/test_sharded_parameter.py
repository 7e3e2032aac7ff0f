"""ShardedParameter: first values on any layout, and specs held against parameters."""

from dataclasses import replace

import pytest
import torch

from raymega.box import Box
from raymega.errors import InternalError
from raymega.parallel.core import sharded_parameter
from raymega.parallel.core.shard_spec import make_spec
from raymega.parallel.core.sharded_parameter import ShardedParameter, check_specs, initialise
from raymega.plan.grid import ExpertPlace
from raymega.plan.layers.global_tensor import GlobalTensor


def _tensor(name="w", shape=(8, 4), *, tp_dim=0, init="normal"):
    return GlobalTensor(
        name=name, shape=shape, tp_dim=tp_dim, init=init, initializer_range=0.5, role="matrix"
    )


def _make(*tensors, tp=1, tp_rank=0, dtype=torch.float64):
    spec = make_spec(tensors, tp=tp, tp_rank=tp_rank)
    param = ShardedParameter(torch.full(spec.shape, float("nan"), dtype=dtype), spec)
    initialise(param, seed=7)
    return param


def test_parameter_is_registered_by_a_module_and_keeps_its_spec():
    module = torch.nn.Module()
    module.weight = _make(_tensor())
    (param,) = module.parameters()
    assert isinstance(param, ShardedParameter)
    assert param.spec.name == "w" and param.requires_grad and param.is_leaf


@pytest.mark.parametrize("tp_dim", [0, 1])
def test_initial_values_of_shards_are_slices_of_the_whole(tp_dim):
    tensor = _tensor(tp_dim=tp_dim)
    shards = [_make(tensor, tp=2, tp_rank=rank) for rank in range(2)]
    assert torch.equal(torch.cat(shards, dim=tp_dim), _make(tensor))


@pytest.mark.parametrize("shape", [(8, 4), (13,), (5, 2, 3)], ids=str)
def test_initial_values_are_the_same_drawn_some_rows_at_a_time(shape, monkeypatch):
    tensor = replace(_tensor(shape=shape, tp_dim=-1), padded_rows=2)
    whole = _make(tensor)
    assert not whole[-2:].any() and whole[:-2].all()
    monkeypatch.setattr(sharded_parameter, "DRAWN_AT_ONCE", 7)
    assert torch.equal(_make(tensor), whole)


@pytest.mark.parametrize("etp_dim", [1, 2])
def test_initial_values_of_cut_experts_are_slices_of_all_experts(etp_dim):
    tensor = replace(_tensor(shape=(4, 6, 2)), tp_dim=-1, etp_dim=etp_dim)

    def block(ep_rank, etp_rank):
        place = ExpertPlace(ep=2, ep_rank=ep_rank, etp=2, etp_rank=etp_rank)
        spec = make_spec((tensor,), tp=4, tp_rank=3, experts=place)
        param = ShardedParameter(torch.empty(spec.shape, dtype=torch.float64), spec)
        initialise(param, seed=7)
        return param

    rows = [torch.cat([block(e, f) for f in range(2)], dim=etp_dim) for e in range(2)]
    assert torch.equal(torch.cat(rows), _make(tensor))


def test_fused_parameter_starts_as_its_parts_do():
    q, k = _tensor("q"), _tensor("k", (4, 4))
    fused = [_make(q, k, tp=2, tp_rank=rank) for rank in range(2)]
    assert torch.equal(torch.cat([fused[0][:4], fused[1][:4]]), _make(q))
    assert torch.equal(torch.cat([fused[0][4:], fused[1][4:]]), _make(k))


def test_initial_values_have_the_tensor_s_deviation_and_constants():
    values = _make(_tensor(shape=(200, 200)))
    assert abs(values.std() - 0.5) < 0.01
    assert torch.equal(_make(_tensor(init="ones")), torch.ones(8, 4, dtype=torch.float64))
    assert torch.equal(_make(_tensor(init="zeros")), torch.zeros(8, 4, dtype=torch.float64))


def test_lower_precision_starts_as_the_rounded_float64_values():
    exact = _make(_tensor())
    assert not torch.equal(exact, exact.float().double())
    assert torch.equal(_make(_tensor(), dtype=torch.bfloat16), exact.to(torch.bfloat16))


def test_good_specs_pass():
    check_specs([_make(_tensor("a"), _tensor("b")), _make(_tensor("c", tp_dim=-1), tp=2)])


def test_all_faults_of_specs_are_told_at_once():
    wrong_shape = ShardedParameter(torch.zeros(3, 4), make_spec((_tensor("a"),), tp=1, tp_rank=0))
    twice = [_make(_tensor("b")), _make(_tensor("b"))]
    with pytest.raises(InternalError) as caught:
        check_specs([wrong_shape, *twice])
    text = str(caught.value)
    assert "parameter a: shape (3, 4); its spec says (8, 4)" in text
    assert "parameter b: blocks" in text and "holds each element once" in text


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ({"local": Box(offset=(4, 0), shape=(8, 4))}, "must tile"),
        ({"box": Box(offset=(0, 0), shape=(4, 4))}, "as large as its local block"),
        ({"box": Box(offset=(1, 0), shape=(8, 4))}, "must lie inside"),
    ],
    ids=["local-outside", "sizes-differ", "global-outside"],
)
def test_pieces_that_do_not_fit_are_refused(place, rule):
    param = _make(_tensor())
    (piece,) = param.spec.pieces
    param.spec = replace(param.spec, pieces=(replace(piece, **place),))
    with pytest.raises(InternalError, match=rule):
        check_specs([param])
