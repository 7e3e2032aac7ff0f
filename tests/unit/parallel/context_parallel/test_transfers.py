"""Transfers that are waited for where they are used: what is returned has arrived."""

from types import SimpleNamespace

import pytest
import torch

from raymega.parallel.comm.process_groups import Group
from raymega.parallel.comm.trace import CommLog
from raymega.parallel.context_parallel import transfers

RANKS = Group(name="cp", ranks=(0, 1), index=1, timeout_s=7.0, handle=None)


@pytest.mark.parametrize("name", ["exchange", "sum_parts"])
def test_what_is_returned_has_arrived_and_is_counted(name, monkeypatch):
    tensor, waits = torch.zeros(4, 3), []

    def start(moved, _ranks):
        def wait(timeout_s):
            waits.append(timeout_s)
            moved.view(-1).copy_(torch.arange(12.0))

        pending = SimpleNamespace(wait=wait, is_idle=False)
        return (moved, pending) if name == "exchange" else pending

    monkeypatch.setattr(transfers, "start_all_to_all", start)
    monkeypatch.setattr(transfers, "start_reduce_scatter_in_place", start)
    log = CommLog()
    found = getattr(transfers, name)(tensor, RANKS, log)
    arrived = torch.arange(12.0).view(4, 3)
    assert torch.equal(found, arrived if name == "exchange" else arrived[2:])
    assert waits == [7.0]
    assert log.sent_bytes(["cp_exchange" if name == "exchange" else "cp_reduce"]) == 24
