"""Grouped products against a loop over experts: every way the rows can lie, and sums that are there."""

import pytest
import torch

from raymega.parallel.expert_parallel.grouped_gemm import (
    FRESH_BYTES,
    GroupedWeightGrad,
    group_sizes,
    grouped_product,
)

COUNTS = {"one expert": [7], "even": [4, 4, 4], "uneven": [5, 0, 7], "one": [12, 0, 0]}
WIDTHS = {"short": (16, 8), "long": (384, 256), "unaligned": (5, 3)}


@pytest.fixture(params=COUNTS)
def counts(request):
    return torch.tensor(COUNTS[request.param])


@pytest.fixture(params=WIDTHS)
def widths(request):
    return WIDTHS[request.param]


def _draw(counts, widths, dtype):
    random = torch.Generator().manual_seed(3)
    rows, grad = (
        torch.randn(int(counts.sum()), width, generator=random, dtype=dtype)
        for width in reversed(widths)
    )
    weight = torch.randn(len(counts), *widths, generator=random, dtype=dtype)
    return rows, grad, weight, group_sizes(rows, counts, inner=widths[0])


def _loop(parts):
    return [each.double() for each in parts]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-4)])
def test_product_is_each_experts_own(counts, widths, dtype, limit):
    rows, _, weight, sizes = _draw(counts, widths, dtype)
    found = grouped_product(rows, weight.mT, sizes)
    parts = zip(_loop(rows.split(counts.tolist())), _loop(weight), strict=True)
    wanted = torch.cat([part @ one.T for part, one in parts])
    assert (found.double() - wanted).abs().max() < limit


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-4)])
def test_weight_gradients_are_added_where_the_sums_lie(counts, widths, dtype, limit, is_first):
    rows, grad, weight, sizes = _draw(counts, widths, dtype)
    total = torch.full_like(weight, float("nan") if is_first else 2.0)
    GroupedWeightGrad(grad, rows, sizes).add_to(total, is_first=is_first)
    parts = zip(_loop(grad.split(counts.tolist())), _loop(rows.split(counts.tolist())), strict=True)
    wanted = torch.stack([left.T @ right for left, right in parts]) + (0.0 if is_first else 2.0)
    assert (total.double() - wanted).abs().max() < limit


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("counts", [[0], [0, 0, 0]], ids=str)
def test_experts_without_rows_leave_the_sums(counts, is_first):
    rows, grad, weight, sizes = _draw(torch.tensor(counts), WIDTHS["short"], torch.float32)
    assert grouped_product(rows, weight.mT, sizes).shape == grad.shape
    total = torch.full_like(weight, float("nan") if is_first else 2.0)
    GroupedWeightGrad(grad, rows, sizes).add_to(total, is_first=is_first)
    assert (total == (0.0 if is_first else 2.0)).all()


def test_long_sums_are_long():
    assert 3 * 384 * 256 * 4 > FRESH_BYTES > 3 * 16 * 8 * 4


def test_adapters_of_a_width_that_no_kernel_takes_are_padded():
    """Four features of bfloat16 are 8 bytes; grouped_mm wants rows of 16."""
    rows = torch.randn(5, 16, dtype=torch.bfloat16)
    counts = torch.tensor([2, 3])
    assert group_sizes(rows, counts, inner=16).largest == -1
    sizes = group_sizes(rows, counts, inner=16, adapter_rank=4)
    assert sizes.largest == 3
    factors = torch.randn(2, 4, 16, dtype=torch.bfloat16)
    found = grouped_product(rows, factors.mT, sizes)
    wanted = torch.cat(
        [part @ one.T for part, one in zip(rows.split([2, 3]), factors, strict=True)]
    )
    assert torch.equal(found, wanted)
