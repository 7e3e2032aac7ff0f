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
def interleaver():
    return PassInterleaver(torch.device("cpu"))


def _pass(interleaver, done, name, transfers):
    def work():
        for number in range(transfers):
            done.append(f"launch {name}{number}")
            InterleavedWork(interleaver, _Transfer(f"{name}{number}", done)).wait(5.0)
        done.append(f"end {name}")

    return work


def test_the_other_pass_works_before_a_wait_up_to_its_own(interleaver):
    for _ in range(3):
        done = []
        interleaver.together(_pass(interleaver, done, "f", 2), _pass(interleaver, done, "b", 3))
        assert done == [
            "launch f0", "launch b0", "wait f0", "launch f1", "wait b0", "launch b1",
            "wait f1", "end f", "wait b1", "launch b2", "wait b2", "end b",
        ]  # fmt: skip


def test_a_pass_alone_only_waits(interleaver):
    done = []
    _pass(interleaver, done, "f", 2)()
    assert done == ["launch f0", "wait f0", "launch f1", "wait f1", "end f"]


def test_seconds_are_those_of_the_firsts_turns():
    readings = iter([0.0, 3.0, 10.0, 11.0, 12.0])
    interleaver, done = PassInterleaver(torch.device("cpu"), clock=lambda: next(readings)), []
    assert (
        interleaver.together(_pass(interleaver, done, "f", 1), _pass(interleaver, done, "b", 1))
        == 4.0
    )


@pytest.mark.parametrize("place", [0, 1])
def test_a_failure_ends_both_and_is_told(interleaver, place):
    done = []

    def fails():
        _pass(interleaver, done, "x", 1)()
        raise ValueError("lost")

    passes = [_pass(interleaver, done, "y", 9)] * 2
    passes[place] = fails
    with pytest.raises(ValueError, match="lost"):
        interleaver.together(*passes)
    assert "end y" not in done
    again = []
    interleaver.together(_pass(interleaver, again, "f", 1), _pass(interleaver, again, "b", 1))
    assert {"end f", "end b"} <= set(again)
