"""Work: an operation of torch.distributed under way, and how its end is waited for.

Each wait is bounded, ends when the world is aborted, and is counted, so that what a rank does itself can
be told from what it waits for. Operations are begun in parallel.comm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from raymega.errors import CommunicationError, Fault
from raymega.parallel.comm.process_groups import WaitTimer

# How often a rank that waits for a collective looks whether its world was aborted.
TURN_S = 0.1
# torch cuts timeouts to whole milliseconds, and takes 0 for no limit.
TICK_S = 1e-3
# How to wait for an operation in at most so many seconds.
Wait = Callable[[dist.Work, float], None]


class Work:
    """An operation under way; torch keeps its tensors alive until it is done.

    ``launched_s`` is a reading of ``time.perf_counter`` from before its launch: this rank's part had
    not been given then, however long the launch took or the thread was kept from reading a clock after it.
    On a GPU, waiting only orders the current stream behind it, and NCCL's watchdog keeps the
    timeout that the group was made with.
    """

    __slots__ = ("_wait", "_waited", "_what", "_work", "launched_s")

    def __init__(
        self,
        what: Callable[[], str],
        work: dist.Work | None,
        wait: Wait,
        waited: WaitTimer,
        *,
        launched_s: float = 0.0,
    ) -> None:
        self._what, self._work, self._wait, self._waited = what, work, wait, waited
        self.launched_s = launched_s

    def __str__(self) -> str:
        """Which operation on which ranks."""
        return self._what()

    @property
    def is_idle(self) -> bool:
        """Nothing was launched, because the group has one rank."""
        return self._work is None

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when it is complete, from the thread that completes it."""
        assert self._work is not None, "nothing was launched"
        self._work.get_future().add_done_callback(lambda _: callback())

    def is_done(self) -> bool:
        """True only if waiting would not block; a transfer over gloo never tells before."""
        return self._work is None or self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        """Return when it is complete.

        Raises:
            CommunicationError: It failed, was aborted, or took longer than ``timeout_s``.
        """
        if self._work is None:
            return
        began = time.monotonic()
        try:
            self._wait(self._work, timeout_s)
        except RuntimeError as error:
            waited_s = time.monotonic() - began
            raise failure(self._what(), waited_s, timeout_s, error) from error
        self._waited.seconds += time.monotonic() - began


def nothing_pending() -> Work:
    """For a caller that has nothing to wait for after all."""
    return Work(str, None, wait_once, WaitTimer())


def wait_on_stream(work: dist.Work, _timeout_s: float) -> None:
    """On a GPU: only order the current stream behind it."""
    work.wait()


def wait_once(work: dist.Work, timeout_s: float) -> None:
    """For a transfer over gloo, which closes the pair at the first timeout."""
    work.wait(_duration(timeout_s))


def wait_in_turns(work: dist.Work, timeout_s: float) -> None:
    """Wait for a collective of gloo, which nothing interrupts, and look for an abort in between."""
    end = time.monotonic() + timeout_s
    while True:
        turn_end = min(time.monotonic() + TURN_S, end)
        try:
            work.wait(_duration(turn_end - time.monotonic()))
            return
        except RuntimeError:
            if time.monotonic() < turn_end - TICK_S or turn_end == end:
                raise
        if not dist.is_initialized():
            raise RuntimeError("the world was aborted")


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=max(seconds, TICK_S))


def failure(
    what: str, waited_s: float, timeout_s: float, error: RuntimeError
) -> CommunicationError:
    """The error of an operation that failed, as raymega tells it."""
    cause = (str(error).strip() or type(error).__name__).splitlines()[0]
    return CommunicationError(
        Fault(
            fact=f"{what} failed after {waited_s:.1f} s: {cause}",
            rule=f"every rank must take part within elastic.collective_timeout_s={timeout_s:g} s",
            remedy="look at the rank that failed first; if all are only slow, raise "
            "elastic.collective_timeout_s",
        )
    )
