"""Virtual time of a simulated fleet: events in order, and what stands in for the modules that read a clock or wait."""

import heapq
from concurrent.futures import Executor, Future
from datetime import UTC, datetime, timedelta
from itertools import count

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Killed(BaseException):
    """The process of a driver ends here, without a last word; no handler of the engine may catch it."""


class Timeline:
    """The clock of everything, and the events to come. Time passes only in ``advance_to`` and what calls it."""

    def __init__(self):
        self.now_s, self._queue, self._number = 1000.0, [], count()
        self.debts = []  # of work in a thread of its own: seconds that it slept, instead of the clock

    # As a Clock and as the module time.

    def monotonic(self):
        return self.now_s

    def monotonic_ns(self):
        return int(self.now_s * 1e9) + next(self._number)

    def time_ns(self):
        return int(self.now_s * 1e9)

    def timestamp(self):
        return (BEGIN + timedelta(seconds=self.now_s)).isoformat()

    def sleep(self, seconds):
        if self.debts:
            self.debts[-1] += seconds
        else:
            self.advance_to(self.now_s + seconds)

    # Events.

    def after(self, seconds, action, *args):
        heapq.heappush(self._queue, (self.now_s + seconds, next(self._number), action, args))

    def next_event(self, end_s):
        """Make the next event until ``end_s`` happen; False, and the time is ``end_s``, if there is none."""
        if self._queue and self._queue[0][0] <= end_s:
            at_s, _, action, args = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, at_s)
            action(*args)
            return True
        self.now_s = max(self.now_s, end_s)
        return False

    def advance_to(self, end_s):
        while self.next_event(end_s):
            pass

    def wait_for(self, is_done, timeout_s):
        """Let time pass until ``is_done``, for ``timeout_s`` seconds at most."""
        end_s = self.now_s + timeout_s
        while not is_done() and self.now_s < end_s:
            self.next_event(end_s)

    def wait(self, futures, timeout=None):
        """As concurrent.futures.wait."""
        self.wait_for(lambda: all(future.done() for future in futures), timeout)


class VirtualEvent:
    """As threading.Event, in the work of an executor."""

    def __init__(self, timeline):
        self._timeline, self._is_set = timeline, False

    def set(self):
        self._is_set = True

    def wait(self, seconds):
        if not self._is_set:
            self._timeline.sleep(seconds)
        return self._is_set


class LaterExecutor(Executor):
    """One thread's work: each piece happens a while after the one before, at one moment of virtual time.

    Its result is there once the seconds that it slept are over. A driver that is paused does none of it.
    """

    def __init__(self, timeline, driver, draw):
        self._timeline, self._driver, self._draw = timeline, driver, draw
        self.waiting, self._is_busy = [], False

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self.waiting.append((future, fn, args, kwargs))
        self._begin_next()
        return future

    def _begin_next(self):
        if self.waiting and not self._is_busy:
            self._is_busy = True
            self._timeline.after(self._draw.uniform(0.01, 0.5), self._work)

    def _work(self):
        if not self._driver.is_alive:
            return
        if self._driver.is_paused or self._driver.is_writing:
            self._timeline.after(0.2, self._work)
            return
        future, fn, args, kwargs = self.waiting[0]
        self._timeline.debts.append(0.0)
        result = error = None
        try:
            result = fn(*args, **kwargs)
        except Killed:
            self._driver.is_doomed = True
            return
        except Exception as raised:
            error = raised
        finally:
            slept_s = self._timeline.debts.pop()
        self._timeline.after(slept_s, self._end, future, result, error)

    def _end(self, future, result, error):
        self.waiting.pop(0)
        self._is_busy = False
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
        self._begin_next()
