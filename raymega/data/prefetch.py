"""Computes a step's input in a thread while the previous step runs.

It owns the thread and the guess of the next step; the function that computes is an argument of each call. Kept, it
would keep whoever owns both: memory of a step would wait for Python's collector.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from raymega.errors import DataError, Fault
from raymega.plan.batch import BatchPlan

Made = TypeVar("Made")
_Key = tuple[BatchPlan, int]


class Ahead(Generic[Made]):
    """Results of a pure function of a step's batch and first sample, one step early.

    It guesses that the next step follows this one with an equal batch. If the guess is wrong, the
    result is computed when it is requested. The newest result is kept.

    Attributes:
        waited_s: Seconds for which the newest result was waited for.
    """

    def __init__(self, *, is_guessing: bool, timeout_s: float) -> None:
        """Start the thread; without ``is_guessing`` only requested results are computed."""
        self._is_guessing, self._timeout_s = is_guessing, timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raymega-ahead")
        self._under_way: dict[_Key, Future[Made]] = {}
        self.waited_s = 0.0

    def begin(
        self, make: Callable[[BatchPlan, int], Made], batch: BatchPlan, first_sample: int
    ) -> None:
        """Begin to compute the result of a step by the function ``make``, before :meth:`of` asks for it."""
        self._begin(make, (batch, first_sample))

    def of(
        self, make: Callable[[BatchPlan, int], Made], batch: BatchPlan, first_sample: int
    ) -> Made:
        """Return the result of a step and begin to compute that of the next one, by the function ``make``.

        Raises:
            DataError: The result was not computed within the timeout.
            RaymegaError: The function raised this error.
        """
        began, key = time.monotonic(), (batch, first_sample)
        wanted = [key]
        if self._is_guessing:
            # Wrong at a batch ramp or after skipped samples.
            wanted.append((batch, first_sample + batch.global_batch_size))
        # Wrong guesses are cancelled if they have not begun. The last step's result goes first, so
        # that the next one is made in its memory.
        for other in self._under_way.keys() - set(wanted):
            self._under_way.pop(other).cancel()
        for each in wanted:
            self._begin(make, each)
        try:
            return self._under_way[key].result(self._timeout_s)
        except TimeoutError as error:
            raise _late(first_sample, self._timeout_s) from error
        finally:
            self.waited_s = time.monotonic() - began

    def _begin(self, make: Callable[[BatchPlan, int], Made], key: _Key) -> None:
        if key not in self._under_way:
            self._under_way[key] = self._thread.submit(make, *key)


def _late(first_sample: int, timeout_s: float) -> DataError:
    return DataError(
        Fault(
            fact=f"the input of the step at sample {first_sample} is not there after {timeout_s:g} s",
            rule="each rank reads and packs it within elastic.collective_timeout_s",
            remedy="raise elastic.collective_timeout_s, move data.path to a faster store, or pack fewer "
            "documents in a step",
        )
    )
