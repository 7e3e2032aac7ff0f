import threading
import time

import pytest

from raymega.chaos.phase_barriers import (
    RAISE,
    SLOW_STEP_S,
    Arrival,
    Gate,
    arrival_at,
    begin_step,
    close_gate,
    open_gate,
    slow_down,
    wait_at,
)
from raymega.chaos.worker_entry import ChaosError, GatedChannel
from raymega.messages import Entered, Progress, ShardSaved, StartWorker
from tests.support.channels import KeptReports
from tests.support.jobs import make_test_plan

HERE = Arrival(pid=1, rank=1, attempt=2, step=5)


@pytest.mark.parametrize(
    ("gate", "fits"),
    [
        (Gate(name="g", phase="step", at=5), True),
        (Gate(name="g", phase="step", at=6), False),
        (Gate(name="g", phase="step", at=5, rank=0), False),
        (Gate(name="g", phase="rendezvous", at=2, rank=1), False),
        (Gate(name="g", phase="step", at=5, below=4), True),
        (Gate(name="g", phase="step", at=5, below=2), False),
    ],
    ids=["fits", "later step", "other rank", "other phase", "small world", "large world"],
)
def test_gate_holds_who_it_fits_and_nobody_else(tmp_path, gate, fits):
    close_gate(tmp_path, gate)
    open_gate(tmp_path, "g", answer="on")
    assert wait_at(tmp_path, HERE, phase="step", world_size=2) == ("on" if fits else "")
    assert arrival_at(tmp_path, "g") == (HERE if fits else None)


def test_gate_is_met_once_and_waited_at_until_it_is_opened(tmp_path):
    close_gate(tmp_path, Gate(name="g", phase="step", at=1))
    answers = []
    waiter = threading.Thread(
        target=lambda: answers.append(wait_at(tmp_path, HERE, phase="step", world_size=2))
    )
    waiter.start()
    while arrival_at(tmp_path, "g") is None:
        time.sleep(0.001)
    assert wait_at(tmp_path, HERE, phase="step", world_size=2) == "", "it is taken"
    assert waiter.is_alive()
    open_gate(tmp_path, "g", answer=RAISE)
    waiter.join(100)
    assert answers == [RAISE]


def test_steps_of_a_run_that_is_slowed_down_begin_later(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr("raymega.chaos.phase_barriers.time.sleep", waits.append)
    begin_step(tmp_path)
    assert waits == []
    slow_down(tmp_path)
    begin_step(tmp_path)
    assert waits == [SLOW_STEP_S]


@pytest.fixture
def gated(tmp_path):
    start = StartWorker(
        plan_json=make_test_plan().to_json(), run_uri=str(tmp_path), attempt=1, rank=0,
        local_rank=0, rendezvous="", restore="", device="cpu",
    )  # fmt: skip
    return GatedChannel(KeptReports(), start)


def act_in(gated, phase):
    match phase:
        case "restore":
            gated.report(Entered(rank=0, phase="built", seconds=0.0))
        case "snapshot":
            gated.report(Progress(rank=0, step=1))
        case "step":
            gated.requests()


@pytest.mark.parametrize("phase", ["restore", "snapshot", "step"])
def test_worker_raises_where_it_is_told_to(gated, tmp_path, phase):
    close_gate(tmp_path / "chaos", Gate(name="g", phase=phase, at=1))
    open_gate(tmp_path / "chaos", "g", answer=RAISE)
    with pytest.raises(ChaosError):
        act_in(gated, phase)
    act_in(gated, phase)  # once


def test_what_is_told_to_the_writing_thread_is_raised_by_the_training_thread(gated, tmp_path):
    close_gate(tmp_path / "chaos", Gate(name="g", phase="upload", at=0))
    open_gate(tmp_path / "chaos", "g", answer=RAISE)
    saved = ShardSaved(
        rank=0, step=1, boxes=(), state={}, stall_s=0.0, write_s=0.0, num_bytes=0
    )  # fmt: skip
    gated.report(saved)
    with pytest.raises(ChaosError):
        gated.requests()
