"""The pace of a save: a rate that is kept to the clock, and bytes that pass unchanged."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import pytest

from raymega.checkpoint.save.rate_limit import PIECE_BYTES, RateLimiter


class SimulatedTime:
    def __init__(self):
        self.now_s = 50.0

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.mark.parametrize("bytes_per_s", [7, 1000, 10**9])
def test_bytes_take_as_long_as_the_rate_says(bytes_per_s):
    at = SimulatedTime()
    pace = RateLimiter(bytes_per_s, clock=at.clock, sleep=at.sleep)
    data = bytes(range(256)) * 8
    assert b"".join(pace.pass_on([data, data])) == data * 2
    assert at.now_s - 50.0 == pytest.approx(2 * len(data) / bytes_per_s)


def test_time_without_bytes_is_not_saved_up():
    at = SimulatedTime()
    pace = RateLimiter(100, clock=at.clock, sleep=at.sleep)
    at.sleep(1000.0)
    list(pace.pass_on([bytes(300)]))
    assert at.now_s == pytest.approx(1053.0)


def test_without_a_rate_nothing_waits_and_pieces_are_views():
    def refuse(_seconds):
        raise AssertionError("it slept")

    data = memoryview(bytearray(PIECE_BYTES + 5))
    pieces = list(RateLimiter(0, sleep=refuse).pass_on([data]))
    assert [len(piece) for piece in pieces] == [PIECE_BYTES, 5]
    assert pieces[0].obj is data.obj


def test_two_files_share_the_rate():
    """While time stands still each piece, of whichever file, waits for all that went before it."""
    begin, pauses = Barrier(2, timeout=100), []
    pace = RateLimiter(1 << 20, clock=lambda: 50.0, sleep=pauses.append)

    def pass_on(_file):
        begin.wait()
        return sum(map(len, pace.pass_on([bytes(1 << 19)])))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(pass_on, range(2))) == [1 << 19] * 2
    assert max(pauses) == pytest.approx(1.0)
    steps = [after - before for before, after in pairwise([0.0, *sorted(pauses)])]
    assert min(steps) > 0 and max(steps) <= 0.1 + 1e-6


def test_pace_is_kept_to_the_real_clock_unless_told_otherwise():
    pace = RateLimiter(1)
    assert (pace._clock, pace._sleep) == (time.monotonic, time.sleep)
