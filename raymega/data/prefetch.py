"""Ahead: what a step needs and its place in the data decides, made while the step before it runs.

It knows nothing of what is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from raymega.errors import DataError, Fault

Made = TypeVar("Made")
_Key = tuple[int, int]


class Ahead(Generic[Made]):
    """Results of a pure function of a step's first sample and number of samples, one step early.

    A guess that the next step has as many samples as this one: where it has not, or where the run
    was put somewhere else, the result is made when it is asked for. The newest result is kept.

    Attributes:
        waited_s: How long the newest result was waited for.
    """

    def __init__(
        self, make: Callable[[int, int], Made], *, is_guessing: bool, timeout_s: float
    ) -> None:
        """``is_guessing`` false makes nothing that was not asked for."""
        self._make, self._is_guessing, self._timeout_s = make, is_guessing, timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raymega-ahead")
        self._under_way: dict[_Key, Future[Made]] = {}
        self.waited_s = 0.0

    def of(self, first_sample: int, size: int) -> Made:
        """The result of a step; that of the next one is begun.

        Raises:
            DataError: It was not made within the timeout.
            RaymegaError: What making it raised.
        """
        began, key = time.monotonic(), (first_sample, size)
        future = self._begun(key)
        wanted = {key: future}
        if self._is_guessing:
            following = first_sample + size, size
            wanted[following] = self._begun(following)
        for other in self._under_way.keys() - wanted.keys():
            self._under_way[other].cancel()
        self._under_way = wanted
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            raise _late(first_sample, self._timeout_s) from error
        finally:
            self.waited_s = time.monotonic() - began

    def _begun(self, key: _Key) -> Future[Made]:
        return self._under_way.get(key) or self._thread.submit(self._make, *key)


def _late(first_sample: int, timeout_s: float) -> DataError:
    return DataError(
        Fault(
            fact=f"the schedule of the step at sample {first_sample} is not there after {timeout_s:g} s",
            rule="each rank makes it within elastic.collective_timeout_s",
            remedy="raise elastic.collective_timeout_s, or pack fewer documents in a step",
        )
    )
