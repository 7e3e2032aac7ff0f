"""Work: a pending operation of torch.distributed, and the ways to wait for it.

Each wait is bounded and ends when the world is aborted. Its seconds are counted, so that a rank's own
work can be told from waiting. `parallel/comm/collectives.py` starts the operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from raymega.errors import CommunicationError, Fault
from raymega.parallel.comm.process_groups import WaitTimer

# Seconds between two checks for an aborted world while a rank waits for a collective.
TURN_S = 0.1
# torch truncates timeouts to whole milliseconds and takes 0 for no limit, so none is shorter.
TICK_S = 1e-3
# A function that waits for an operation, for at most the given seconds.
Wait = Callable[[dist.Work, float], None]


class Work:
    """A pending operation; torch keeps its tensors alive until it is done.

    ``launched_s`` is a reading of ``time.perf_counter`` from before the launch. At that time this rank had
    not yet contributed, however long the launch itself took. On a GPU, waiting only orders the current
    stream behind the operation; `comm/world.py` watches the timeout. ``keeps_alive`` refers to the tensors
    until the first wait, as torch's own work does.
    """

    __slots__ = ("_wait", "_waited", "_what", "_work", "keeps_alive", "launched_s")

    def __init__(
        self,
        what: Callable[[], str],
        work: dist.Work | None,
        wait: Wait,
        waited: WaitTimer,
        *,
        launched_s: float = 0.0,
        keeps_alive: object = None,
    ) -> None:
        self._what, self._work, self._wait, self._waited = what, work, wait, waited
        self.launched_s = launched_s
        self.keeps_alive = keeps_alive

    def __str__(self) -> str:
        """Return the operation, its group and its ranks as text."""
        return self._what()

    @property
    def is_idle(self) -> bool:
        """True where nothing was launched, because the group has one rank."""
        return self._work is None

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once on completion, in the thread that completes the operation."""
        assert self._work is not None, "nothing was launched"
        self._work.get_future().add_done_callback(lambda _: callback())

    def is_done(self) -> bool:
        """Return whether a wait would not block; False for any gloo transfer that was not waited for."""
        return self._work is None or self._work.is_completed()

    def wait(self, timeout_s: float) -> None:
        """Return when the operation is complete.

        Raises:
            CommunicationError: The operation failed, was aborted, or took longer than ``timeout_s``.
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
        self.keeps_alive = None


def nothing_pending() -> Work:
    """Return a Work that is already complete, for a caller that had nothing to launch."""
    return Work(str, None, wait_once, WaitTimer())


def wait_on_stream(work: dist.Work, _timeout_s: float) -> None:
    """Order the current CUDA stream behind ``work``; the host does not wait."""
    work.wait()


def wait_once(work: dist.Work, timeout_s: float) -> None:
    """Wait for a gloo transfer in one call: a timeout closes the connection, so it cannot be retried."""
    work.wait(_duration(timeout_s))


def wait_in_turns(work: dist.Work, timeout_s: float) -> None:
    """Wait for a gloo collective in turns of TURN_S, and check for an aborted world in between.

    A single long wait could not be interrupted.
    """
    end = time.monotonic() + timeout_s
    while True:
        turn_end = min(time.monotonic() + TURN_S, end)
        try:
            work.wait(_duration(turn_end - time.monotonic()))
            return
        except RuntimeError:
            # An error before the turn's end is a failure, not its timeout; the last turn's is final.
            if time.monotonic() < turn_end - TICK_S or turn_end == end:
                raise
        if not dist.is_initialized():
            raise RuntimeError("the world was aborted")


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=max(seconds, TICK_S))


def failure(
    what: str, waited_s: float, timeout_s: float, error: RuntimeError
) -> CommunicationError:
    """Return the CommunicationError for a failed operation, with the wait and the timeout in seconds."""
    cause = (str(error).strip() or type(error).__name__).splitlines()[0]
    return CommunicationError(
        Fault(
            fact=f"{what} failed after {waited_s:.1f} s: {cause}",
            rule=f"every rank must take part within elastic.collective_timeout_s={timeout_s:g} s",
            remedy="look at the rank that failed first; if all are only slow, raise "
            "elastic.collective_timeout_s",
        )
    )
