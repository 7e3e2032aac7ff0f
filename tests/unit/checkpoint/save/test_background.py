"""One job at a time in a kept thread: who waits for it, and when it ends."""

import gc
import os
import threading
from threading import Event

import pytest

from raymega.checkpoint.save.background import NICE, Background


def test_jobs_run_one_after_another_in_one_thread_that_stands_back():
    background, seen = Background("jobs"), []

    def job():
        thread = threading.get_native_id()
        seen.append((thread, os.getpriority(os.PRIO_PROCESS, thread)))

    for _ in range(3):
        background.run(job)
        assert background.wait(100)
    assert len({thread for thread, _ in seen}) == 1 and len(seen) == 3
    assert {nice for _, nice in seen} == {max(NICE, os.getpriority(os.PRIO_PROCESS, 0))}
    assert threading.get_native_id() not in {thread for thread, _ in seen}


def test_it_is_busy_until_the_job_is_done_and_takes_no_other():
    background, may_end = Background("jobs"), Event()
    assert not background.is_busy and background.wait(0.0)
    background.run(may_end.wait)
    assert background.is_busy and not background.wait(0.01)
    with pytest.raises(AssertionError, match="one job at a time"):
        background.run(may_end.wait)
    may_end.set()
    assert background.wait(100) and not background.is_busy


def test_thread_ends_with_its_object():
    background = Background("jobs that end")
    background.run(lambda: None)
    assert background.wait(100)
    (thread,) = (at for at in threading.enumerate() if at.name == "jobs that end")
    del background
    gc.collect()
    thread.join(100)
    assert not thread.is_alive()
