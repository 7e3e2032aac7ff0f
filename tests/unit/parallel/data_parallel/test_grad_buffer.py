"""GradBuffer on one rank: sums over micro-batches, their precision and their place."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from raymega.errors import InternalError
from raymega.parallel.comm.process_groups import WaitTimer
from raymega.parallel.comm.work import Work
from raymega.parallel.data_parallel.grad_accumulator import GradSink
from raymega.parallel.data_parallel.grad_buffer import GradBuffer
from tests.support.params import ALONE, make_buffer, make_param, make_table, make_tensor


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


def test_first_gradient_takes_the_place_of_the_sum_before_and_the_next_ones_are_added():
    params = _params()
    buffer = make_buffer(params)
    for factor in (1.0, 10.0):
        buffer.zero()
        for part in (factor, 2 * factor):
            sum((part * param).sum() for param in params[:2]).backward()
        buffer.finish()
        for param in params[:2]:
            assert torch.equal(buffer.view(param), torch.full_like(param, 3 * factor))
        assert not buffer.view(params[2]).any()


def test_a_gradient_that_is_put_off_completes_nothing_until_it_is_there():
    (param, *_), complete = _params(), []
    sums = SimpleNamespace(place=lambda _: (torch.zeros(2, 3), True))
    sink = GradSink(lambda: sums, complete.append)
    sink.collect(param)
    assert complete == []
    sink.place(param)
    sink.collect(param)
    assert [each is param for each in complete] == [True]
    # the next backward's is put off too
    sink.collect(param)
    assert len(complete) == 1


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


@pytest.fixture
def sent(monkeypatch):
    """Buckets that were launched, in order."""
    buckets = []

    def launch(bucket, _group):
        buckets.append(bucket.numel())
        return Work(str, None, None, WaitTimer())

    monkeypatch.setattr("raymega.parallel.data_parallel.grad_buffer.start_all_reduce", launch)
    return buckets


@pytest.mark.parametrize(
    ("bucket_bytes", "sizes"), [(1, [6, 4, 6]), (60, [10, 6]), (1 << 20, [16])], ids=str
)
def test_buckets_end_between_views_and_cover_all(sent, bucket_bytes, sizes):
    make_buffer(_params(), bucket_bytes=bucket_bytes).finish()
    assert sent == sizes


def _chain(params):
    """Backward reaches the last parameter first."""
    y = torch.ones((), dtype=torch.float64)
    for param in params:
        y = (y * param).sum()
    return y


def test_bucket_leaves_in_the_last_backward_as_soon_as_it_is_full(sent):
    params, seen = _params(), []
    for param in params:
        param.register_post_accumulate_grad_hook(lambda _param: seen.append(list(sent)))
    buffer = make_buffer(params, bucket_bytes=1)
    _chain(params).backward()
    assert seen == [[], [], []] and sent == []
    buffer.launch_when_full()
    _chain(params).backward()
    assert seen[3:] == [[], [6], [6, 4]] and sent == [6, 4, 6]
    buffer.finish()
    assert sent == [6, 4, 6]
    buffer.zero()
    _chain(params).backward()
    assert sent == [6, 4, 6]


def test_parameter_without_gradient_holds_back_later_buckets_until_the_end(sent):
    params = _params()
    buffer = make_buffer(params, bucket_bytes=1)
    buffer.launch_when_full()
    _chain([params[0], params[2]]).backward()
    assert sent == [6]
    buffer.finish()
    assert sent == [6, 4, 6]


def test_frozen_parameter_holds_nothing_back(sent):
    params = _params()
    params[1].requires_grad_(requires_grad=False)
    buffer = make_buffer(params, bucket_bytes=1)
    buffer.launch_when_full()
    _chain(params).backward()
    assert sent == [6, 4, 6]


def test_gradient_that_comes_after_its_bucket_has_left_is_refused():
    params = _params()
    buffer = make_buffer(params, bucket_bytes=1)
    buffer.launch_when_full()
    _chain(params).backward()
    with pytest.raises(InternalError, match="bucket 0: c"):
        _chain(params).backward()


def test_only_the_buckets_of_the_chunk_in_its_last_backward_leave(sent):
    first, second = _params()[:2], _params()[2:]
    buffer = GradBuffer(make_table([first, second]), ALONE)
    buffer.launch_when_full(1)
    _chain([*first, *second]).backward()
    assert sent == [6]
    buffer.finish()
    assert sent == [6, 10]


def test_nothing_is_left_of_a_buffer_that_was_let_go():
    params = _params()
    buffer = make_buffer(params)
    sum(param.sum() for param in params).backward()
    seen = [weakref.ref(buffer), *map(weakref.ref, params)]
    del buffer, params
    gc.collect()
    assert [each() for each in seen] == [None] * len(seen)
