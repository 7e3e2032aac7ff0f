"""PassInterleaver: two passes of one rank, of which one works while the other waits for its experts.

A forward and a backward of different micro-batches need nothing of each other. Each has a thread, but only
one works at a time, and the other's turn comes where it would wait. Who works when goes by what the passes
do and never by a clock, so all ranks of a group launch their transfers in one order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import NamedTuple

import torch

from raymega.parallel.comm.trace import Waitable


class PassInterleaver:
    """Whose turn it is. With one pass under way it is always that one's.

    Args:
        device: Where the passes compute.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device, self._clock = device, clock
        self._helper: ThreadPoolExecutor | None = None
        self._gates = Semaphore(0), Semaphore(0)
        self._are_over = [True, True]
        self._has_failed = False
        self._turn, self._began = 0, 0.0
        self._seconds = [0.0, 0.0]

    def together(self, first: Callable[[], None], second: Callable[[], None]) -> float:
        """Run both; ``first`` begins, in the calling thread, and ``second`` at its first wait.

        Returns:
            Seconds of all turns of ``first``.

        Raises:
            Exception: What made one of them fail; the other ends where it waits.
        """
        # One thread for all steps: a CPU's worker threads belong to the thread that asks for them.
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, "second-pass", initializer=self._enter_device)
        self._gates, self._are_over = (Semaphore(0), Semaphore(0)), [False, False]
        self._has_failed, self._seconds = False, [0.0, 0.0]
        self._turn, self._began = 0, self._clock()
        other = self._helper.submit(self._run_second, second)
        try:
            self._run(0, first)
        except _OtherFailedError:
            pass
        except BaseException:
            other.exception()
            raise
        other.result()
        return self._seconds[0]

    def wait(self, pending: Waitable, timeout_s: float) -> None:
        """Wait for a transfer; first it is the other pass's turn, up to where that one waits."""
        mine = self._turn
        if not self._are_over[1 - mine]:
            self._pass_on(mine)
            self._gates[mine].acquire()
            if self._has_failed:
                raise _OtherFailedError
        pending.wait(timeout_s)

    def _run(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._are_over[number] = True
            self._pass_on(number)

    def _run_second(self, work: Callable[[], None]) -> None:
        self._gates[1].acquire()
        if not self._has_failed:
            self._run(1, work)

    def _pass_on(self, mine: int) -> None:
        now = self._clock()
        self._seconds[mine] += now - self._began
        self._turn, self._began = 1 - mine, now
        self._gates[1 - mine].release()

    def _enter_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)


class InterleavedWork(NamedTuple):
    """An operation under way that is waited for by :meth:`PassInterleaver.wait`."""

    interleaver: PassInterleaver
    pending: Waitable

    def wait(self, timeout_s: float) -> None:
        """Return when it is complete; meanwhile the other pass may have worked."""
        self.interleaver.wait(self.pending, timeout_s)


class _OtherFailedError(Exception):
    """Ends a pass whose companion raised."""
