"""Entry module of workers that evaluate beside a run: those of `evaluate/worker.py`, on cores that training leaves idle.

A rank that waits for its accelerator or a peer sleeps, and needs a core at once when it wakes. A busy neighbour of
ordinary priority would keep the core for its slice, some milliseconds at each of a step's many waits.
"""

from __future__ import annotations

import os
from contextlib import suppress
from threading import get_native_id

from raymega.evaluate import worker
from raymega.evaluate.worker import abort, host_rendezvous, warm_up
from raymega.messages import Channel, StartWorker

__all__ = ["abort", "host_rendezvous", "run_worker", "warm_up"]


def run_worker(start: StartWorker, channel: Channel, rendezvous: object) -> None:
    """Score as `evaluate/worker.py` does; every other thread of the node comes first."""
    _stand_back()
    worker.run_worker(start, channel, rendezvous)


def _stand_back() -> None:
    """Let ordinary threads take this thread's core at once, and those of the threads that it starts.

    SCHED_IDLE has a weight of 3, where Ray's workers have 36 (niceness 15), so an evaluation also proceeds where no core
    is ever idle. A higher niceness is not enough: it lets the thread finish its slice first.
    """
    with suppress(AttributeError, OSError):  # only Linux has it
        os.sched_setscheduler(get_native_id(), os.SCHED_IDLE, os.sched_param(0))
