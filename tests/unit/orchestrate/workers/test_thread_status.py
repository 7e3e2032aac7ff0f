"""Where a thread stands, read from outside: its wait, its instruction, its calls and the kernel's books."""

import os
import signal
import subprocess
import time
from threading import Event, Thread

import pytest

from raymega.orchestrate.workers.thread_status import process_state, thread_status_of
from raymega.parallel.comm.process_groups import WaitTimer
from raymega.parallel.comm.work import Work
from raymega.pipeline.executor import Executor
from raymega.schedule.instructions import Instruction, Op

LET_GO = Event()
GUARD_S = 100
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def stand():
    """Where a thread stands that was started with a function, once it sleeps in its wait."""
    threads = []

    def start(target):
        LET_GO.clear()
        threads.append(Thread(target=target, daemon=True))
        threads[0].start()
        seen = []
        _until(lambda: LET_GO._cond._waiters)
        _until(
            lambda: (
                seen.append(thread_status_of(threads[0], rank=3, step=7)) or seen[-1].state == "S"
            )
        )
        return seen[-1]

    start.threads = threads
    yield start
    LET_GO.set()
    for thread in threads:
        thread.join(GUARD_S)


def _until(is_true):
    end_s = time.monotonic() + GUARD_S
    while not is_true():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.001)


def _cpu_s(thread):
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def test_idle_thread_shows_its_calls_and_that_it_sleeps(stand):
    seen = stand(lambda: LET_GO.wait())
    assert (seen.rank, seen.step, seen.state, seen.waits_for) == (3, 7, "S", "")
    assert any(line.endswith("wait") for line in seen.stack)
    assert "after step 7 it is in threading.py" in str(seen)


def test_seconds_of_cpu_are_the_threads_own(stand):
    def work():
        while time.thread_time() < 5 * TICK_S:
            pass
        LET_GO.wait()

    seen = stand(work)
    assert 4 * TICK_S <= seen.cpu_s <= _cpu_s(stand.threads[0]) + TICK_S


def test_collective_and_instruction_are_named(stand):
    pending = Work(
        lambda: "all_reduce on group tp", object(), lambda *_: LET_GO.wait(), WaitTimer()
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
    namespace = {"__name__": "raymega.checkpoint.save.writer", "let_go": LET_GO}
    exec("def wait():\n    let_go.wait()", namespace)
    assert stand(namespace["wait"]).is_patient
    assert not thread_status_of(Thread(), rank=0, step=0).is_patient


def test_stopped_process_is_seen_to_be_stopped():
    process = subprocess.Popen(["sleep", "300"])
    try:
        assert process_state(process.pid) in "SRD"
        os.kill(process.pid, signal.SIGSTOP)
        _until(lambda: process_state(process.pid) == "T")
    finally:
        process.kill()
        process.wait()
    assert process_state(process.pid) == ""
