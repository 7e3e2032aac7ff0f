"""Waits of a save for the one before: all ranks together, with signs of life."""

from types import SimpleNamespace

import pytest

from raymega.config.elastic import ElasticSection
from raymega.messages import Entered
from raymega.orchestrate.driver.attempt_monitor import AttemptMonitor
from raymega.train import save_schedule
from raymega.train.save_schedule import SaveScheduler
from raymega.train.state import TrainState
from tests.support.fakes import FakeClock
from tests.support.jobs import make_test_plan


class Writer:
    """A writer whose save before is under way for ``left_s`` seconds."""

    def __init__(self, clock, left_s):
        self.clock, self.left_s, self.saved = clock, left_s, []

    def advances(self, seconds, *, is_last):
        self.is_last = is_last
        self.clock.advance(min(seconds, self.left_s))
        self.left_s -= min(seconds, self.left_s)
        return self.left_s > 0

    def save(self, step, _blocks, _state, *, is_last, waited_s):
        self.saved.append((step, is_last, round(waited_s)))


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("mine_s, others_s", [(2000.0, 0.0), (0.0, 2000.0)])
def test_no_rank_counts_as_hung_while_one_writes_the_save_before(
    mine_s, others_s, is_last, monkeypatch
):
    """A rank that is done waits for the others here, and not in a collective of the next step."""
    clock = FakeClock()
    monitor = AttemptMonitor(
        world_size=2, first_step=100, elastic=ElasticSection(), now_s=clock.now_s
    )
    for phase in ("rendezvous", "built", "restored"):
        for rank in range(2):
            monitor.observe(Entered(rank=rank, phase=phase, seconds=0.1), clock.now_s)

    def report(sign):
        monitor.observe(sign, clock.now_s)

    def sum_with_others(_parts, numbers):
        clock.advance(1.0)
        assert monitor.failure(clock.now_s) is None
        return (numbers[0] + float(clock.now_s - began_s < others_s),)

    monkeypatch.setattr(save_schedule, "sum_over_world", sum_with_others)
    monkeypatch.setattr(save_schedule, "refuse_non_finite_state", lambda *_: None)
    monkeypatch.setattr(save_schedule, "time", SimpleNamespace(monotonic=clock.monotonic))
    parts = SimpleNamespace(
        plan=make_test_plan("checkpoint.every=100"), optimizer=SimpleNamespace(blocks=list)
    )
    writer, began_s = Writer(clock, mine_s), clock.now_s
    scheduler = SaveScheduler(
        parts, channel=SimpleNamespace(report=report), writer=writer, snapshots=None, rank=0
    )
    outcome = SimpleNamespace(
        state=TrainState(step=200), save=False, extra_reductions=(1.0, 0.0, 0.0, 0.0)
    )
    scheduler.observe(outcome, is_last=is_last)
    scheduler.save_what_is_due(outcome, is_last=is_last)
    ((step, told_last, waited_s),) = writer.saved
    assert (step, told_last, writer.is_last) == (200, is_last, is_last)
    assert waited_s == clock.now_s - began_s >= 2000
