"""The agent of a node: what it does with a notice, and with a SIGTERM to the parent of Ray's start."""

import os
import signal
import sys
import threading
import time

import pytest

from raymega.orchestrate import node_agent
from raymega.orchestrate.node_agent import NodeAgent
from raymega.orchestrate.notices import Notice

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.fixture
def drained(monkeypatch):
    found = []
    monkeypatch.setattr(
        node_agent, "drain_node", lambda address, node, notice: found.append((node, notice))
    )
    monkeypatch.setattr(node_agent, "END_MARGIN_S", 1.0)
    return found


def test_notice_of_the_cloud_drains_once_and_the_agent_ends_with_the_time(drained):
    notice = Notice(seconds=1.2, reason="spot")
    agent = NodeAgent(address="head:1", ask=lambda: notice, node_id="n1", poll_s=0.1)
    assert agent.run() == 0
    assert drained == [("n1", notice)]


def test_sigterm_drains_first_and_ends_the_command_when_the_time_is_up(drained):
    agent = NodeAgent(
        address="head:1", ask=lambda: None, node_id="n1", command=SLEEP, grace_s=2.0, poll_s=0.1
    )
    begun_s = time.monotonic()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    before = signal.getsignal(signal.SIGTERM)
    assert agent.run() == -signal.SIGTERM
    assert drained == [("n1", Notice(seconds=2.0, reason="this machine got a SIGTERM"))]
    assert time.monotonic() - begun_s >= 1.4, "the run had its time"
    assert signal.getsignal(signal.SIGTERM) is before


def test_agent_ends_with_its_command(drained):
    command = (sys.executable, "-c", "raise SystemExit(7)")
    agent = NodeAgent(address="head:1", ask=lambda: None, command=command, poll_s=0.1)
    assert agent.run() == 7 and drained == []
