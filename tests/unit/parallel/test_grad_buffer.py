"""GradBuffer on one rank: sums over micro-batches, their precision and their place."""

import pytest
import torch

from raymega.parallel.comm import Pending
from tests.support.params import make_buffer, make_param, make_tensor


def _params(dtype=torch.float64):
    shapes = {"a": (2, 3), "b": (4,), "c": (3, 2)}
    return [make_param(make_tensor(name, shape), dtype=dtype) for name, shape in shapes.items()]


def test_micro_batches_add_up_and_leave_no_gradient_behind():
    params = _params()
    buffer = make_buffer(params)
    for factor in (1.0, 10.0):
        sum((factor * param).sum() for param in params).backward()
    for param in params:
        assert param.grad is None
        assert torch.equal(buffer.view(param), torch.full_like(param, 11.0))


def test_a_parameter_that_got_no_gradient_keeps_zeros():
    params = _params()
    buffer = make_buffer(params)
    params[0].sum().backward()
    assert torch.count_nonzero(buffer.view(params[1])) == 0
    buffer.zero()
    buffer.finish()
    assert torch.count_nonzero(buffer.view(params[0])) == 0


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_sums_are_float32_or_better(dtype, expected):
    params = _params(dtype)
    buffer = make_buffer(params)
    for _ in range(1000):
        params[1].sum().backward()
    assert buffer.view(params[1]).dtype == expected
    assert buffer.view(params[1]).tolist() == [1000.0] * 4


def test_views_lie_in_backward_order_without_gaps():
    params = _params()
    buffer = make_buffer(params)
    places = [buffer.view(param).data_ptr() for param in reversed(params)]
    assert [place - places[0] for place in places] == [0, 6 * 8, 10 * 8]


@pytest.mark.parametrize(
    ("bucket_bytes", "sizes"), [(1, [6, 4, 6]), (60, [10, 6]), (1 << 20, [16])], ids=str
)
def test_buckets_end_between_views_and_cover_all(monkeypatch, bucket_bytes, sizes):
    sent = []
    buffer = make_buffer(_params(), bucket_bytes=bucket_bytes)
    monkeypatch.setattr(
        "raymega.parallel.grad_buffer.start_all_reduce",
        lambda bucket, _group: sent.append(bucket) or Pending("", None, None),
    )
    buffer.finish()
    assert [bucket.numel() for bucket in sent] == sizes


def test_scale_multiplies_every_gradient():
    params = _params()
    buffer = make_buffer(params)
    sum(param.sum() for param in params).backward()
    buffer.scale(0.25)
    assert all(torch.equal(buffer.view(p), torch.full_like(p, 0.25)) for p in params)
