"""Where a thread stands, read from outside: its wait, its instruction, its calls and the kernel's books."""

import os
import signal
import subprocess
import time
from threading import Event, Thread

import pytest

from raymega.orchestrate.stand import process_state, stand_of
from raymega.parallel.groups import Waited
from raymega.parallel.pending import Pending
from raymega.pipeline.executor import Executor
from raymega.schedule.instructions import Instruction, Op

LET_GO = Event()


@pytest.fixture
def stand():
    """Where a thread stands that was started with a function, once it sleeps."""
    threads = []

    def start(target):
        LET_GO.clear()
        threads.append(Thread(target=target, daemon=True))
        threads[0].start()
        time.sleep(0.1)
        return stand_of(threads[0], rank=3, step=7)

    yield start
    LET_GO.set()
    for thread in threads:
        thread.join(5)


def test_idle_thread_shows_its_calls_and_that_it_sleeps(stand):
    seen = stand(lambda: LET_GO.wait())
    assert (seen.rank, seen.step, seen.state, seen.waits_for) == (3, 7, "S", "")
    assert any(line.endswith("wait") for line in seen.stack) and seen.cpu_s < 1.0
    assert "after step 7 it is in threading.py" in str(seen)


def test_collective_and_instruction_are_named(stand):
    pending = Pending(
        lambda: "all_reduce on group tp", object(), lambda *_: LET_GO.wait(), Waited()
    )
    task = Instruction(op=Op.FORWARD, micro_batch=2)

    executor = Executor([task], [], p2p=None)
    planned = executor._rounds[0][0]._replace(
        act=lambda _step, _task: pending.wait(5.0), is_last=False
    )
    seen = stand(lambda: executor._carry_out(planned, None))
    assert (seen.waits_for, seen.doing) == ("all_reduce on group tp", str(task))
    assert "it waits for all_reduce on group tp" in str(seen)


def test_wait_for_a_checkpoint_is_patient(stand):
    namespace = {"__name__": "raymega.checkpoint.writer", "let_go": LET_GO}
    exec("def wait():\n    let_go.wait()", namespace)
    assert stand(namespace["wait"]).is_patient
    assert not stand_of(Thread(), rank=0, step=0).is_patient


def test_stopped_process_is_seen_to_be_stopped():
    process = subprocess.Popen(["sleep", "30"])
    try:
        assert process_state(process.pid) in "SRD"
        os.kill(process.pid, signal.SIGSTOP)
        end = time.monotonic() + 5
        while process_state(process.pid) != "T" and time.monotonic() < end:
            time.sleep(0.01)
        assert process_state(process.pid) == "T"
    finally:
        process.kill()
        process.wait()
    assert process_state(process.pid) == ""
