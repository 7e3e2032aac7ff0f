"""The agent of a node: what it does with a notice, and with a SIGTERM to the parent of Ray's start."""

import os
import signal
import subprocess
import sys
from threading import Event
from types import SimpleNamespace

import pytest
from ray.exceptions import RpcError

from raymega.orchestrate.cluster import node_agent
from raymega.orchestrate.cluster.node_agent import NodeAgent
from raymega.orchestrate.cluster.preemption_notices import Notice
from tests.support.fakes import FakeClock

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
MARGIN_S = 100.0
"""For the command's end after its SIGTERM, which the test sees for real."""


class Told(Event):
    """Passes no time: it keeps for how long it was waited for."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        return self.is_set()


@pytest.fixture
def drained(monkeypatch):
    found = []
    monkeypatch.setattr(
        node_agent, "drain_node", lambda address, node, notice: found.append((node, notice))
    )
    monkeypatch.setattr(node_agent, "END_MARGIN_S", MARGIN_S)
    return found


@pytest.fixture
def clock(monkeypatch):
    """What the agent takes for time: it goes on when the agent sleeps."""
    clock = FakeClock()
    time = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.advance)
    monkeypatch.setattr(node_agent, "time", time)
    return clock


def test_notice_of_the_cloud_drains_once_and_the_agent_ends_with_the_time(drained, clock):
    notice, told = Notice(seconds=MARGIN_S + 7.0, reason="spot"), Told()
    agent = NodeAgent(
        address="head:1", ask=lambda: notice, node_id="n1", poll_s=0.1, _told=told
    )  # fmt: skip
    assert agent.run() == 0
    assert drained == [("n1", notice)]
    assert told.waits == [0.1, pytest.approx(7.0)]


@pytest.mark.parametrize("error", [RpcError("no head"), OSError("no such host")])
def test_head_that_does_not_answer_is_asked_again_and_costs_the_run_none_of_its_time(
    clock, monkeypatch, error
):
    """The agent ended with the error, and its child with it: Ray and the ranks at once."""
    asked, begun_s = [], clock.now_s

    def drain(_address, _node, notice):
        asked.append((clock.now_s - begun_s, notice.seconds))
        clock.advance(4.0)
        if len(asked) < 3:
            raise error

    monkeypatch.setattr(node_agent, "drain_node", drain)
    agent = NodeAgent(
        address="head:1", ask=lambda: Notice(seconds=30.0, reason="spot"), node_id="n1",
        command=SLEEP, poll_s=0.1,
    )  # fmt: skip
    assert agent.run() == -signal.SIGTERM
    # 4 s for each try and a tenth between them: each names what is left
    assert asked == [
        (0.0, 30.0),
        (pytest.approx(4.1), pytest.approx(25.9)),
        (pytest.approx(8.2), pytest.approx(21.8)),
    ]
    assert clock.now_s - begun_s == pytest.approx(27.0, abs=0.2), "Ray ends before the machine"


def test_head_that_never_answers_is_not_asked_beyond_the_machines_time(clock, monkeypatch):
    asked = []

    def refuse(_address, _node, _notice):
        asked.append(clock.now_s)
        raise RpcError("no head")

    monkeypatch.setattr(node_agent, "drain_node", refuse)
    agent = NodeAgent(
        address="head:1", ask=lambda: Notice(seconds=30.0, reason="spot"), node_id="n1",
        command=SLEEP, poll_s=5.0,
    )  # fmt: skip
    begun_s = clock.now_s
    assert agent.run() == -signal.SIGTERM
    assert len(asked) == 6 and clock.now_s - begun_s == pytest.approx(27.0, abs=0.2)


def test_sigterm_drains_first_and_ends_the_command_when_the_time_is_up(drained, clock, monkeypatch):
    ended, begun_s, end = [], clock.now_s, subprocess.Popen.terminate

    def note_and_end(child):
        ended.append((list(drained), clock.now_s - begun_s))
        end(child)

    monkeypatch.setattr(subprocess.Popen, "terminate", note_and_end)
    agent = NodeAgent(
        address="head:1", ask=lambda: os.kill(os.getpid(), signal.SIGTERM), node_id="n1",
        command=SLEEP, grace_s=MARGIN_S + 2.0, poll_s=0.1,
    )  # fmt: skip
    before = signal.getsignal(signal.SIGTERM)
    assert agent.run() == -signal.SIGTERM
    notice = Notice(seconds=MARGIN_S + 2.0, reason="this machine got a SIGTERM")
    assert drained == [("n1", notice)]
    assert ended == [(drained, pytest.approx(2.0, abs=0.2))], "the run had its time"
    assert signal.getsignal(signal.SIGTERM) is before


def test_agent_ends_with_its_command(drained):
    command = (sys.executable, "-c", "raise SystemExit(7)")
    agent = NodeAgent(address="head:1", ask=lambda: None, command=command, poll_s=0.1)
    assert agent.run() == 7 and drained == []
