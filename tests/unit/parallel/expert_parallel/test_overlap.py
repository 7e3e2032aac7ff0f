"""Two passes of a rank: one works at a time, in an order that no clock decides, and both end."""

import pytest
import torch

from raymega.parallel.expert_parallel.overlap import InterleavedWork, PassInterleaver


class _Transfer:
    """Is waited for by whoever launched it; writes down when."""

    def __init__(self, name, done):
        self.name, self.done = name, done

    def wait(self, timeout_s):
        assert timeout_s == 5.0
        self.done.append(f"wait {self.name}")


@pytest.fixture
def turns():
    return PassInterleaver(torch.device("cpu"))


def _pass(turns, done, name, transfers):
    def work():
        for number in range(transfers):
            done.append(f"launch {name}{number}")
            InterleavedWork(turns, _Transfer(f"{name}{number}", done)).wait(5.0)
        done.append(f"end {name}")

    return work


def test_the_other_pass_works_before_a_wait_up_to_its_own(turns):
    for _ in range(3):
        done = []
        turns.together(_pass(turns, done, "f", 2), _pass(turns, done, "b", 3))
        assert done == [
            "launch f0", "launch b0", "wait f0", "launch f1", "wait b0", "launch b1",
            "wait f1", "end f", "wait b1", "launch b2", "wait b2", "end b",
        ]  # fmt: skip


def test_a_pass_alone_only_waits(turns):
    done = []
    _pass(turns, done, "f", 2)()
    assert done == ["launch f0", "wait f0", "launch f1", "wait f1", "end f"]


def test_seconds_are_those_of_the_firsts_turns():
    readings = iter([0.0, 3.0, 10.0, 11.0, 12.0])
    turns, done = PassInterleaver(torch.device("cpu"), clock=lambda: next(readings)), []
    assert turns.together(_pass(turns, done, "f", 1), _pass(turns, done, "b", 1)) == 4.0


@pytest.mark.parametrize("place", [0, 1])
def test_a_failure_ends_both_and_is_told(turns, place):
    done = []

    def fails():
        _pass(turns, done, "x", 1)()
        raise ValueError("lost")

    passes = [_pass(turns, done, "y", 9)] * 2
    passes[place] = fails
    with pytest.raises(ValueError, match="lost"):
        turns.together(*passes)
    assert "end y" not in done
    again = []
    turns.together(_pass(turns, again, "f", 1), _pass(turns, again, "b", 1))
    assert {"end f", "end b"} <= set(again)
