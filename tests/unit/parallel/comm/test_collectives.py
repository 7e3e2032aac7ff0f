"""comm on a group of one rank: it moves nothing, yet refuses what would be wrong on more."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from raymega.errors import CommunicationError, InternalError
from raymega.parallel.comm import collectives
from raymega.parallel.comm.process_groups import build_groups
from raymega.parallel.comm.work import wait_once
from raymega.plan.grid import Grid

ALONE = build_groups(Grid(), 0, timeout_s=1.0).dp
OPERATIONS = {
    "all_reduce": lambda x: collectives.all_reduce(x, ALONE),
    "start_all_reduce": lambda x: collectives.start_all_reduce(x, ALONE),
    "all_gather": lambda x: collectives.all_gather(x, ALONE),
    "reduce_scatter": lambda x: collectives.reduce_scatter(x, ALONE),
    "broadcast": lambda x: collectives.broadcast(x, ALONE, 0),
    "send": lambda x: collectives.isend(x, ALONE, 0, 0),
    "receive": lambda x: collectives.irecv(x, ALONE, 0, 0),
}
WRONG = {
    "strided": (torch.ones(8)[::2], "strides (2,)"),
    "transposed": (torch.ones(2, 3).t(), "strides (1, 3)"),
    "expanded": (torch.ones(1).expand(4), "strides (0,)"),
    "bool": (torch.ones(4, dtype=torch.bool), "dtype torch.bool"),
    "complex": (torch.ones(4, dtype=torch.complex64), "dtype torch.complex64"),
    "fp8": (torch.ones(4).to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
    "graph": (torch.ones(4, requires_grad=True), "part of a gradient graph"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_would_be_silently_wrong_is_refused(operation, wrong):
    tensor, fact = WRONG[wrong]
    with pytest.raises(InternalError) as caught:
        OPERATIONS[operation](tensor)
    assert fact in str(caught.value) and "on group dp" in str(caught.value)


def test_parameters_may_be_sent_where_no_gradient_is_recorded():
    param = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        assert collectives.all_reduce(param, ALONE) is param


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_a_scalar_has_no_rows(operation):
    with pytest.raises(InternalError, match="dim 0 must exist"):
        OPERATIONS[operation](torch.tensor(1.0))


@pytest.mark.parametrize("operation", ["send", "receive"])
def test_a_rank_cannot_be_its_own_peer(operation):
    with pytest.raises(InternalError, match=r"another place in \[0, 1\)"):
        OPERATIONS[operation](torch.ones(4))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_one_rank_gets_its_own_tensor_back(operation):
    tensor = torch.arange(4.0)
    assert OPERATIONS[operation](tensor) is tensor
    assert tensor.tolist() == [0, 1, 2, 3]


def test_one_rank_waits_for_nobody():
    pending = collectives.start_all_reduce(torch.ones(1), ALONE)
    assert pending.is_done()
    pending.wait(0.0)
    collectives.barrier(ALONE)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CommunicationError("lost"), True),
        (dist.DistNetworkError("lost"), True),
        (dist.DistBackendError("lost"), True),
        (InternalError("ours"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_communication_errors_are_told_from_a_rank_s_own(error, expected):
    assert collectives.is_communication_error(error) is expected


def test_launch_is_dated_before_it_so_that_no_sum_is_there_before_a_part_is_given(monkeypatch):
    moments = []
    monkeypatch.setattr(collectives.time, "perf_counter", lambda: moments.append("read") or 1.5)
    group = SimpleNamespace(handle="dp", resolve=lambda: None, waited=None)
    work = collectives._start(
        "sum", torch.ones(1), group, lambda _: moments.append("launched"), wait_once
    )
    assert moments == ["read", "launched"] and work.launched_s == 1.5
