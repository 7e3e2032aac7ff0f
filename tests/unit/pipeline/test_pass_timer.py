"""Device time of passes: waits between them do not count, and a slow rank is named as a straggler.

Events are of a device whose clock the stage and the transfers move.
"""

from types import SimpleNamespace

import pytest
import torch

from raymega.events import StragglerDetected
from raymega.messages import RankMemory
from raymega.orchestrate.driver.rank_reports import RankReports
from raymega.pipeline.executor import Executor
from raymega.pipeline.pass_timer import PassTimer
from raymega.schedule.order import Sizes
from raymega.schedule.table import make_schedule
from raymega.train.throughput import BusyTimeMeter
from tests.support.jobs import make_test_plan

M = 4


class Device:
    """A clock in seconds, and marks in its stream."""

    def __init__(self):
        self.now_s, self.num_events, self.num_waits = 0.0, 0, 0

    def event(self):
        self.num_events += 1
        mark = SimpleNamespace(at_s=None)
        mark.record = lambda: setattr(mark, "at_s", self.now_s)
        mark.synchronize = lambda: setattr(self, "num_waits", self.num_waits + 1)
        mark.elapsed_time = lambda end: (end.at_s - mark.at_s) * 1000
        return mark


class Slow(torch.autograd.Function):
    """A layer that takes ``seconds`` forward, and twice as long backward."""

    @staticmethod
    def forward(ctx, x, device, seconds):
        ctx.device, ctx.seconds = device, seconds
        device.now_s += seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.device.now_s += 2 * ctx.seconds
        return gradient, None, None


def meter_of(device, alone, *, seconds):
    """A rank's meter, and a function that runs a step of it with waits between passes."""
    passes = PassTimer(device.event)
    weight = torch.ones(3, requires_grad=True)

    def wait():  # for the next message, after each instruction
        device.now_s += 100.0

    executor = Executor(
        make_schedule("1f1b", Sizes(pp=1, num_micro_batches=M)).lists[0],
        [lambda x, _: Slow.apply(x * weight, device, seconds).sum()],
        alone,
        progress=wait,
        passes=passes,
    )
    work = BusyTimeMeter(torch.device("cuda"), SimpleNamespace(seconds=0.0), passes)

    def step():
        with work:
            executor.run([torch.ones(3)] * M, is_recording=False)

    return work, step


def test_only_passes_of_the_newest_step_count(alone):
    device = Device()
    work, step = meter_of(device, alone, seconds=0.25)
    for _ in range(3):
        step()
    assert work.pop_metrics() == {"worker/work_s": pytest.approx(M * 0.75)}
    assert device.num_events == 2 * 2 * M, "events are used again"
    assert device.num_waits == 1, "the host waits when it is asked, and not in a step"


def test_rank_without_a_pass_or_a_device_says_nothing(alone):
    assert meter_of(Device(), alone, seconds=1.0)[0].pop_metrics() == {}
    assert PassTimer.of(torch.device("cpu")).seconds() is None


def test_slow_gpu_is_named_with_its_node(alone):
    plan = make_test_plan("parallel.pp=1", "parallel.tp=1", "parallel.dp=4")
    reports = RankReports(plan)
    reports.nodes = {rank: f"node{rank}" for rank in range(4)}
    ranks = [meter_of(Device(), alone, seconds=0.5 if rank == 2 else 0.25) for rank in range(4)]
    told = []
    for number in range(1, 4):
        for rank, (work, step) in enumerate(ranks):
            step()
            own = work.pop_metrics()
            told += reports.add(RankMemory(rank=rank, step=number, metrics=own))
    (slow,) = [event for event in told if isinstance(event, StragglerDetected)]
    assert (slow.rank, slow.node, slow.ratio) == (2, "node2", pytest.approx(2.0))
