"""Signs of life: not more than one in a while, and none from whoever is silent. Errors of an aborted world."""

from types import SimpleNamespace

import pytest
import torch

from raymega.checkpoint.load.held_state import NONE, HeldState
from raymega.errors import CommunicationError, NumericsError
from raymega.messages import Entered, StartWorker, Working
from raymega.train import entry
from raymega.train.entry import INTERVAL_S, ProgressReporter, run_worker
from raymega.train.state import TrainState
from tests.support.channels import KeptReports
from tests.support.fakes import FakeClock
from tests.support.jobs import make_test_plan


def test_portions_are_told_at_most_once_in_an_interval():
    clock, channel = FakeClock(), KeptReports()
    progress = ProgressReporter(channel, 3, clock=clock.monotonic)
    for _ in range(10):
        progress()
    assert channel.reports == []
    for _ in range(40):
        clock.advance(INTERVAL_S / 4)
        progress()
    assert channel.reports == [Working(rank=3)] * 10


def test_a_phase_took_the_time_since_the_one_before(monkeypatch):
    clock, channel = FakeClock(), KeptReports()
    monkeypatch.setattr(entry, "time", clock)
    phases = entry._Phases(channel, 3)
    for phase, seconds in (("met", 2.0), ("built", 3.5)):
        clock.advance(seconds)
        phases.passed(phase)
        assert channel.reports[-1] == Entered(rank=3, phase=phase, seconds=seconds)


@pytest.mark.parametrize(
    ("cause", "error"), [("", NumericsError), ("group tp: NCCL lost a peer", CommunicationError)]
)
def test_what_fails_after_an_abort_is_a_lost_connection(cause, error, monkeypatch):
    """An aborted kernel leaves garbage, which may look like bad numbers."""

    def fail(*_):
        raise NumericsError("the state is not finite")

    monkeypatch.setattr(entry, "_train", fail)
    monkeypatch.setattr(entry, "listen_towards", lambda _: None)
    monkeypatch.setattr(entry.world, "open_world", lambda **_: None)
    monkeypatch.setattr(entry.world._world, "cause", cause)
    start = SimpleNamespace(
        plan_json=make_test_plan().to_json(), device="cpu", local_rank=0, rank=0, rendezvous="",
        is_held=False, is_holder=False,
    )  # fmt: skip
    with pytest.raises(error) as caught:
        run_worker(start, KeptReports(), None)
    assert cause in str(caught.value)


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("is_holder", [False, True])
def test_state_of_an_attempt_before_the_last_is_dropped_first(is_held, is_holder, monkeypatch):
    """A process that had no rank for a while may hold the same step of another history."""

    def end(*_):
        raise NumericsError("it has begun")

    held = HeldState()
    held.begin([object()], {"step": 30})
    monkeypatch.setattr(entry, "HELD", held)
    monkeypatch.setattr(entry, "read_plan", end)
    start = SimpleNamespace(is_held=is_held, is_holder=is_holder, plan_json="")
    with pytest.raises(NumericsError):
        run_worker(start, KeptReports(), None)
    assert held.step == (30 if is_held and is_holder else NONE)


@pytest.mark.parametrize("restore", ["", "checkpoints/step-00000010/manifest-a0001.json"])
def test_initial_values_are_drawn_only_where_no_checkpoint_follows(restore, monkeypatch):
    """On a large model they would take longer than the checkpoint that overwrites them."""

    class BuiltError(Exception):
        pass

    def build(*_, has_initial_values, **more):
        assert has_initial_values == (not restore)
        raise BuiltError

    monkeypatch.setattr(entry, "groups_of_plan", lambda *_, **more: None)
    monkeypatch.setattr(entry, "build_parts", build)
    start = SimpleNamespace(rank=0, restore=restore, is_held=False)
    phases = entry._Phases(KeptReports(), 0)
    with pytest.raises(BuiltError):
        entry._train(make_test_plan(), start, KeptReports(), torch.device("cpu"), phases, None)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_live_teacher_is_read_wherever_the_state_comes_from(is_held, monkeypatch):
    """A state that workers hold in memory has nothing of a teacher: without its weights the run would learn from zeros."""

    class RestoredError(Exception):
        pass

    def restored(*_, **more):
        raise RestoredError

    read, parts = [], SimpleNamespace(teacher="teacher", groups=None)
    monkeypatch.setattr(entry, "groups_of_plan", lambda *_, **more: None)
    monkeypatch.setattr(entry, "build_parts", lambda *_, **more: parts)
    monkeypatch.setattr(entry, "load_teacher", lambda *told, **more: read.append(told))
    monkeypatch.setattr(entry, "_go_on", restored)
    monkeypatch.setattr(entry, "_restore", restored)
    plan = make_test_plan(
        "distillation.loss_type=forward_kl", "distillation.teacher_checkpoint=/runs/large", "model.moe={}"
    )  # fmt: skip
    start = SimpleNamespace(
        rank=0, restore="checkpoints/step-00000010/manifest-a0001.json", is_held=is_held
    )
    phases = entry._Phases(KeptReports(), 0)
    with pytest.raises(RestoredError):
        entry._train(plan, start, KeptReports(), torch.device("cpu"), phases, None)
    assert read == [("teacher", "/runs/large")]


def test_abort_reaches_the_world(monkeypatch):
    """The control thread has no other way to free a rank that waits for others."""
    aborted = []
    monkeypatch.setattr(entry.world, "abort_world", lambda: aborted.append(True))
    entry.abort()
    assert aborted == [True]


@pytest.mark.parametrize("key", ["", "checkpoints/step-00000010/manifest-a0001.json"])
def test_rows_of_the_first_step_are_read_beside_the_weights(key, monkeypatch):
    """Its shards may have to come from a store, and need not wait for the weights."""

    class LoadedError(Exception):
        pass

    def loaded(*_, **more):
        raise LoadedError

    begun, plan = [], make_test_plan()
    state = TrainState(step=10, samples=80)
    for name in ("load", "init_from"):
        monkeypatch.setattr(entry, name, loaded)
    monkeypatch.setattr(
        entry, "read_blocks", lambda *_: SimpleNamespace(state=state.scalars(), step=10)
    )
    monkeypatch.setattr(entry, "groups_to_share", lambda *_: ())
    parts = SimpleNamespace(
        plan=plan, groups=None, optimizer=SimpleNamespace(blocks=list),
        loader=SimpleNamespace(begin=lambda *told: begun.append(told)),
    )  # fmt: skip
    start = StartWorker(
        plan_json="", run_uri="/nowhere", attempt=2, rank=0, local_rank=0, rendezvous="", restore=key,
        device="cpu", skipped_samples=((80, 88),),
    )  # fmt: skip
    with pytest.raises(LoadedError):
        entry._restore(parts, start, None)
    assert begun == [(plan.batch, 88 if key else 0)]
