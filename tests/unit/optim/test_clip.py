"""Clipping: who counts in the norm, in which precision, and the factor."""

import pytest
import torch

from raymega.optim.clip import clip_factor, local_norm_sq, local_norm_sq_by_group
from tests.support.params import make_buffer, make_param, make_tensor

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
"""Takes a GPU's branch; the values are in host memory, where it gives the same."""


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_only_primary_parameters_count(device):
    tied = {"is_tied": True, "is_tied_copy": True}
    params = [
        make_param(make_tensor("cut", (4, 2), tp_dim=0), tp=2, tp_rank=1),
        make_param(make_tensor("replica", (3,)), tp=2, tp_rank=1),
        make_param(make_tensor("tied", (4, 2), tp_dim=0), tp=2, tp_rank=1, **tied),
    ]
    buffer = make_buffer(params)
    for param, value in zip(params, (1.0, 10.0, 100.0), strict=True):
        buffer.view(param).fill_(value)
    assert local_norm_sq(buffer.shares(), device) == pytest.approx(4.0)
    assert local_norm_sq(make_buffer(params[1:]).shares(), CPU) == 0.0


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_norm_is_summed_in_float64(device):
    params = [make_param(make_tensor("w", (1000,)), dtype=torch.float32)]
    buffer = make_buffer(params)
    buffer.view(params[0]).fill_(1e-30)
    norm_sq = local_norm_sq(buffer.shares(), device)
    assert norm_sq.dtype == torch.float64
    assert float(norm_sq) == pytest.approx(1e-57, rel=1e-6)


def test_a_norm_whose_squares_float32_cannot_hold_is_finite():
    params = [make_param(make_tensor("w", (5000,)), dtype=torch.float32)]
    buffer = make_buffer(params)
    buffer.view(params[0]).fill_(1e25)
    assert local_norm_sq(buffer.shares(), CPU).isinf()
    for wide in (
        local_norm_sq(buffer.shares(), CPU, is_wide=True),
        local_norm_sq(buffer.shares(), CUDA),
    ):
        assert float(wide) == pytest.approx(5e53, rel=1e-6)
    buffer.view(params[0])[7] = float("inf")
    assert local_norm_sq(buffer.shares(), CPU, is_wide=True).isinf()


def test_a_gradient_that_is_no_number_shows():
    params = [make_param(make_tensor("w", (4,)))]
    buffer = make_buffer(params)
    buffer.view(params[0])[2] = float("nan")
    assert local_norm_sq(buffer.shares(), CPU).isnan()


@pytest.mark.parametrize(
    ("norm", "max_grad_norm", "expected"),
    [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 1.0, 1.0), (9.0, 0.0, 1.0)],
)
def test_factor_shrinks_to_the_limit_and_never_grows(norm, max_grad_norm, expected):
    assert clip_factor(norm, max_grad_norm) == expected


def test_each_group_of_tensors_has_the_squares_of_its_own():
    names = (
        "layers.0.mlp.up.weight",
        "layers.1.mlp.up.weight",
        "layers.1.attention.q.weight",
        "head.weight",
    )
    params = [make_param(make_tensor(name, (4,))) for name in names]
    buffer = make_buffer(params)
    for param, value in zip(params, (1.0, 2.0, 3.0, 4.0), strict=True):
        buffer.view(param).fill_(value)
    groups = ("head", "attention.q", "mlp.up")
    found = local_norm_sq_by_group(buffer.shares(), groups, CPU)
    assert found.tolist() == pytest.approx([4 * 16, 4 * 9, 4 * (1 + 4)])
