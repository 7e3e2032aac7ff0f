"""What is made ahead is what would be made when asked for, and an error comes with its own step."""

import threading
import weakref
from types import SimpleNamespace

import pytest

from raymega.data import prefetch
from raymega.data.prefetch import Ahead
from raymega.errors import DataError
from raymega.plan.batch import make_batch


def _batch(size):
    return make_batch(global_batch_size=size, micro_batch_size=1, dp=1)


FOUR = _batch(4)


class Maker:
    """Notes what is made, and by which thread."""

    def __init__(self):
        self.made, self.asked = [], threading.Semaphore(0)

    def __call__(self, batch, first):
        size = batch.global_batch_size
        self.made.append((first, size))
        self.asked.release()
        if first < 0:
            raise DataError("below the first sample")
        return first, size

    def wait(self, times):
        for _ in range(times):
            assert self.asked.acquire(timeout=100)


def test_next_step_is_made_while_this_one_runs():
    maker = Maker()
    ahead = Ahead(is_guessing=True, timeout_s=100)
    assert ahead.of(maker, FOUR, 0) == (0, 4)
    maker.wait(2)
    assert maker.made == [(0, 4), (4, 4)]
    assert ahead.of(maker, FOUR, 4) == (4, 4)
    maker.wait(1)
    assert maker.made == [(0, 4), (4, 4), (8, 4)]


def test_last_result_is_freed_before_the_next_is_made():
    class Input:
        pass

    alive, refs = {}, {}

    def make(_batch, first):
        alive[first] = {step for step, ref in refs.items() if ref() is not None}
        made = Input()
        refs[first] = weakref.ref(made)
        return made

    ahead = Ahead(is_guessing=True, timeout_s=100)
    for first in (0, 4, 8, 12):
        ahead.of(make, FOUR, first)
    assert 0 not in alive[8] and 4 not in alive[12]


def test_step_that_was_not_guessed_is_right_too():
    maker, ahead = Maker(), Ahead(is_guessing=True, timeout_s=100)
    assert [ahead.of(maker, _batch(size), first) for first, size in ((0, 4), (4, 8), (96, 8), (0, 4))] == [
        (0, 4), (4, 8), (96, 8), (0, 4),
    ]  # fmt: skip


def test_without_guessing_the_same_step_is_made_once():
    maker = Maker()
    ahead = Ahead(is_guessing=False, timeout_s=100)
    assert [ahead.of(maker, FOUR, 0) for _ in range(3)] == [(0, 4)] * 3
    assert maker.made == [(0, 4)]


def test_error_is_raised_by_its_own_step():
    maker, ahead = Maker(), Ahead(is_guessing=True, timeout_s=100)
    assert ahead.of(maker, FOUR, 0) == (0, 4)
    with pytest.raises(DataError, match="below the first"):
        ahead.of(maker, FOUR, -4)
    assert ahead.of(maker, FOUR, 0) == (0, 4)


def test_wait_has_an_end():
    gate = threading.Event()
    ahead = Ahead(is_guessing=False, timeout_s=0.05)
    with pytest.raises(DataError, match=r"sample 8 .* 0\.05 s"):
        ahead.of(lambda *_: gate.wait(100), FOUR, 8)
    gate.set()


def test_step_that_was_begun_is_not_made_again():
    maker = Maker()
    ahead = Ahead(is_guessing=False, timeout_s=100)
    ahead.begin(maker, FOUR, 8)
    maker.wait(1)  # before anybody asks for it
    assert ahead.of(maker, FOUR, 8) == (8, 4) and maker.made == [(8, 4)]


def test_wait_is_measured_from_the_request_to_the_result(monkeypatch):
    clock = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(prefetch, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    ahead = Ahead(is_guessing=False, timeout_s=100)
    for waited_s in (2.5, 1.0):
        ahead.of(Maker(), FOUR, 0)
        assert ahead.waited_s == waited_s
