"""Passes without training leave nothing behind: neither their results nor the pipeline wait for Python's collector."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from raymega.train.forward_only import ForwardOnly
from tests.support.jobs import layout_overrides, make_test_plan


class Alone:
    """Transfers of a pipeline of one stage: none."""

    dtype, device = torch.float32, "cpu"

    def is_last(self, _chunk):
        return True

    def wait_all(self):
        """Nothing is under way."""


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_results_and_pipeline_are_freed_with_their_last_reference():
    plan = make_test_plan(*layout_overrides("tp1-pp1-dp1"))
    stage = SimpleNamespace(head="a head", carried_length=lambda _: 4)
    forward = ForwardOnly(plan, 0, modules=[stage], p2p=Alone())
    batch = SimpleNamespace(tokens=torch.zeros(1, 4))
    (found,) = forward.run(lambda _stage, seen, _hidden: seen.tokens + 1, [batch])
    assert found.tolist() == [[1.0] * 4]
    # the pass's result, and then all of it
    result, pipeline = weakref.ref(found), weakref.ref(forward)
    del found
    assert result() is None
    del forward
    assert pipeline() is None
