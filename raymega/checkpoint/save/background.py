"""Background: runs one job at a time in a persistent thread of low priority.

``Thread.start`` blocks until the new thread has run, which takes long where ranks share cores. A thread
that waits for its next job is only woken. ``writer.py`` supplies the jobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread, get_native_id
from weakref import finalize

NICE = 10
"""Niceness of the thread and of those it starts.

Where ranks share cores, the host copies of other ranks and the next step come first."""

Job = Callable[[], None]


class Background:
    """Runner of jobs in one thread, which starts with the first job and ends with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._is_idle = Event()
        self._is_idle.set()
        self._thread: Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether a job is still running."""
        return not self._is_idle.is_set()

    def run(self, job: Job) -> None:
        """Start ``job``, which must not raise; the job before must have ended."""
        assert not self.is_busy, "one job at a time"
        self._is_idle.clear()
        self._jobs.put(job)
        if self._thread is None:
            self._thread = Thread(
                target=_work, args=(self._jobs, self._is_idle), name=self._name, daemon=True
            )
            self._thread.start()
            # The thread holds only the queue and the event, so None ends it when this object goes.
            finalize(self, self._jobs.put, None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the job has ended; return False on a timeout of ``timeout_s`` seconds."""
        return self._is_idle.wait(timeout_s)


def _work(jobs: SimpleQueue[Job | None], is_idle: Event) -> None:
    """Run jobs until None comes; a function, so that the thread does not keep its owner alive."""
    with suppress(OSError):  # only Linux has a priority per thread
        os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)
    while job := jobs.get():
        try:
            job()
        finally:
            # Free what the job refers to before anyone is told that it has ended.
            del job
            is_idle.set()
