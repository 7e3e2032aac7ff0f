"""fp8 by itself: rounding to the nearest value of the format, scales, products, copies of weights."""

import pytest
import torch

from raymega.parallel.core.weight_grads import WeightGradQueue
from raymega.parallel.expert_parallel.fp8_grouped_gemm import expert_linear, expert_places
from raymega.parallel.expert_parallel.grouped_gemm import group_sizes
from raymega.parallel.tensor_parallel.fp8_linear import Fp8, Fp8Placement, WeightCopies, fp8_linear
from raymega.parallel.tensor_parallel.fp8_tensor import (
    FORWARD,
    GRADIENT,
    Fp8Tensor,
    largest,
    product,
    quantise,
    rounding_margin,
    scale_for,
)
from tests.support.params import ALONE

formats = pytest.mark.parametrize("dtype", [FORWARD, GRADIENT], ids=["e4m3", "e5m2"])


def _values(dtype):
    """All finite numbers of a format, ascending."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()].unique()


def _nearest(x, dtype):
    values = _values(dtype)
    return values[(x.unsqueeze(-1) - values).abs().argmin(-1)]


def _draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()


def _eight(x, dtype, *, by_row):
    return quantise(x, scale_for(largest(x, by_row=by_row), dtype), dtype)


@formats
@pytest.mark.parametrize("by_row", [True, False])
def test_numbers_are_the_nearest_of_the_format(dtype, by_row):
    x = _draw(5, 2, 33) * torch.tensor([1e-6, 1.0, 30.0, 1e9, 0.0]).double()[:, None, None]
    eight = _eight(x, dtype, by_row=by_row)
    assert eight.scale.shape == ((5, 2, 1) if by_row else (1, 1, 1))
    wanted = _nearest(x / eight.scale, dtype)
    torch.testing.assert_close(eight.values.double(), wanted, rtol=0, atol=0)
    ends = (eight.values.double() * eight.scale).abs().amax(-1)
    if by_row:
        torch.testing.assert_close(ends, x.abs().amax(-1))


def test_what_is_no_number_stays_none_and_spreads_no_further_than_its_row():
    x = _draw(3, 8)
    x[0, 1], x[1, 2] = torch.nan, torch.inf
    eight = _eight(x, FORWARD, by_row=True)
    restored = eight.values.double() * eight.scale
    assert restored[:2].isnan().any(-1).all() and restored[2].isfinite().all()


def test_product_is_the_sum_of_products_of_rounded_numbers():
    a, b = _eight(_draw(6, 16), GRADIENT, by_row=False), _eight(_draw(4, 16), FORWARD, by_row=True)
    wanted = (a.values.double() * a.scale) @ (b.values.double() * b.scale).T
    torch.testing.assert_close(product(a, b, torch.float64), wanted, rtol=1e-14, atol=1e-14)
    assert product(a, b, torch.bfloat16).dtype == torch.bfloat16


def test_copies_are_kept_until_weights_change():
    copies, weight = WeightCopies(), _draw(2, 2)
    made = []

    def make():
        made.append(1)
        return Fp8Tensor(weight, weight)

    for _ in range(2):
        copies.get(weight, "rows", make)
    assert len(made) == 1
    copies.get(weight, "columns", make)
    copies.forget()
    copies.get(weight, "rows", make)
    assert len(made) == 3
    copies.is_kept = False
    copies.get(weight, "rows", make)
    assert len(made) == 4


def _grown(multiply, x, weight, grad):
    """Output, and gradients of input and weight."""
    if not len(x):
        return grad, x, torch.zeros_like(weight)
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = multiply(x, weight)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("counts", [[5, 0, 7], [4, 4, 4]], ids=str)
@pytest.mark.parametrize("by_row", [True, False], ids=["rowwise", "tensorwise"])
def test_an_expert_multiplies_its_rows_as_a_linear_layer_does_row_by_row(counts, by_row):
    """Under both recipes; experts without rows among them."""
    fp8, grad_queue = Fp8(by_row=by_row, micro=ALONE.micro), WeightGradQueue()
    fp8.copies.is_kept = False
    up, down = expert_places(fp8, ALONE.etp)
    weight, rows, grad = _draw(3, 6, 8), _draw(sum(counts), 8), _draw(sum(counts), 6)
    sizes = group_sizes(rows, torch.tensor(counts), inner=6)
    alone = Fp8Placement(fp8=Fp8(by_row=True, micro=ALONE.micro))
    alone.fp8.copies.is_kept = False
    for place in (up, down):

        def by_expert(x, w, place=place):
            return expert_linear(x, w, sizes, grad_queue, place)

        found = _grown(by_expert, rows, weight, grad)
        each = [
            _grown(lambda x, w: fp8_linear(x, w, None, alone, grad_queue), *parts)
            for parts in zip(rows.split(counts), weight, grad.split(counts), strict=True)
        ]
        wanted = [torch.cat([y for y, _, _ in each]), torch.cat([x for _, x, _ in each])]
        for mine, theirs in zip(found, [*wanted, torch.stack([w for *_, w in each])], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("numbers", "distance"),
    [
        # steps of 1/8 from 1 to 2, of 2 from 16 to 32
        ([1.05, 1.0], 1.0625 - 1.05),
        ([-17.1, 16.0], 17.1 - 17.0),
        ([3.0], 0.125),
    ],
)
def test_margin_is_the_least_distance_from_a_midpoint_as_a_share_of_the_range(numbers, distance):
    scale = torch.tensor(0.5, dtype=torch.float64)
    found = rounding_margin(
        torch.tensor(numbers, dtype=torch.float64) * scale, scale, torch.float8_e4m3fn
    )
    assert found == pytest.approx(distance / 448, rel=1e-9)
