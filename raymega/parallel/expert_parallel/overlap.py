"""PassInterleaver: two passes of one rank, one of which computes while the other waits for experts.

A forward and a backward of different micro-batches are independent. Each has a thread, but only one
runs at a time; they switch where one would wait for a transfer. The order depends on the passes alone,
never on a clock, so all ranks of a group launch their transfers in one order.
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
    """Scheduler of two passes that take turns; a single pass always has the turn.

    Args:
        device: Device of the passes.
        clock: Monotonic clock, in seconds.
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
        """Run both passes: ``first`` starts, in the calling thread, and ``second`` runs at its first wait.

        Returns:
            Seconds of all turns of ``first``.

        Raises:
            Exception: The error of the pass that failed; the other one is ended at its next wait.
        """
        # One helper thread for all steps: torch's CPU worker pool (OpenMP) belongs to the calling thread.
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, "second-pass", initializer=self._enter_device)
        # A gate a pass: whoever ends its turn releases the other's. New ones, as a failure may leave tokens.
        self._gates, self._are_over = (Semaphore(0), Semaphore(0)), [False, False]
        self._has_failed, self._seconds = False, [0.0, 0.0]
        self._turn, self._began = 0, self._clock()
        # run both; the error of the pass that failed first is raised
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
        """Give the turn to the other pass until it waits or ends, then wait for the transfer."""
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
    """A pending operation whose wait is :meth:`PassInterleaver.wait`."""

    interleaver: PassInterleaver
    pending: Waitable

    def wait(self, timeout_s: float) -> None:
        """Return when it is complete; the other pass may have run meanwhile."""
        self.interleaver.wait(self.pending, timeout_s)


class _OtherFailedError(Exception):
    """Signal that ends a pass after the other one has raised."""
