"""Background: one job at a time, in a thread that is kept and stands back behind everything else.

A thread that is started anew must have run before its starter goes on, and where ranks share cores that
takes its turn; one that waits is only woken. What the jobs are is the writer's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread, get_native_id
from weakref import finalize

NICE = 10
"""Of its thread and of those it starts: where ranks share cores, the copies of the others and the next
step come first."""

Job = Callable[[], None]


class Background:
    """Its thread begins with the first job, and ends with the object or the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._is_idle = Event()
        self._is_idle.set()
        self._thread: Thread | None = None

    @property
    def is_busy(self) -> bool:
        """A job is not done yet."""
        return not self._is_idle.is_set()

    def run(self, job: Job) -> None:
        """Have ``job`` done, which must not raise; the one before must be done."""
        assert not self.is_busy, "one job at a time"
        self._is_idle.clear()
        self._jobs.put(job)
        if self._thread is None:
            self._thread = Thread(
                target=_work, args=(self._jobs, self._is_idle), name=self._name, daemon=True
            )
            self._thread.start()
            finalize(self, self._jobs.put, None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is to be done; false when that took longer."""
        return self._is_idle.wait(timeout_s)


def _work(jobs: SimpleQueue[Job | None], is_idle: Event) -> None:
    """Body of the thread, which must not keep the object alive."""
    with suppress(OSError):  # a thread's priority is its own on Linux alone
        os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)
    while job := jobs.get():
        try:
            job()
        finally:
            del job
            is_idle.set()
