"""The agent of a node: turns the notice that a machine will be taken away into a drain of its Ray node.

It runs beside a node's Ray, or around it: as the parent of ``ray start --block`` it gets the SIGTERM
of Kubernetes first, and passes it on when the run had its time to leave. What a drain means for a
run is the driver's.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event
from types import FrameType

from raymega.errors import Fault, RaymegaError
from raymega.orchestrate.cluster.preemption_notices import Ask, Notice
from raymega.ray_private import gcs_client

log = logging.getLogger(__name__)

POLL_S = 5.0
"""Between questions; AWS gives two minutes of notice and asks for this pace."""
END_MARGIN_S = 3.0
"""Of a grace period that is left for Ray's own end."""


@dataclass(kw_only=True)
class NodeAgent:
    """One node's agent.

    Attributes:
        address: ``host:port`` of the cluster's head.
        ask: Asks the cloud.
        node_id: The node; '' finds the one with this machine's address.
        command: Ray's own start, to be the child of this process; may be empty.
        grace_s: How long after a SIGTERM this process may live.
        poll_s: Between questions.
    """

    address: str
    ask: Ask
    node_id: str = ""
    command: Sequence[str] = ()
    grace_s: float = 30.0
    poll_s: float = POLL_S
    _told: Event = field(default_factory=Event)

    def run(self) -> int:
        """Until the child ends, or a notice was passed on and the time is up; the exit code."""
        child = subprocess.Popen(self.command) if self.command else None
        before = signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            notice = self._wait_for_notice(child)
            if notice is None:
                return child.returncode if child else 0
            self._drain(notice)
            return self._see_off(child, notice)
        finally:
            signal.signal(signal.SIGTERM, before)
            if child is not None and child.poll() is None:
                child.terminate()

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._told.set()

    def _wait_for_notice(self, child: subprocess.Popen[bytes] | None) -> Notice | None:
        """None when there is nothing left to look after."""
        asked_s = -self.poll_s
        while child is None or child.poll() is None:
            if self._told.wait(min(0.2, self.poll_s)):
                return Notice(seconds=self.grace_s, reason="this machine got a SIGTERM")
            if time.monotonic() - asked_s >= self.poll_s:
                asked_s = time.monotonic()
                if (notice := self.ask()) is not None:
                    return notice
        return None

    def _drain(self, notice: Notice) -> None:
        """A refusal is logged: the machine goes all the same."""
        try:
            node_id = self.node_id or find_node(self.address)
            drain_node(self.address, node_id, notice)
            log.warning("node %s leaves in %.0f s: %s", node_id[:8], notice.seconds, notice.reason)
        except (RaymegaError, RuntimeError) as error:
            log.warning("the node could not be drained: %s", error)

    def _see_off(self, child: subprocess.Popen[bytes] | None, notice: Notice) -> int:
        """Give runs their time, then end Ray; without a child a SIGTERM ends the wait."""
        left_s = max(0.0, notice.seconds - END_MARGIN_S)
        if child is None:
            self._told.wait(left_s)
            return 0
        until_s = time.monotonic() + left_s
        while time.monotonic() < until_s and child.poll() is None:
            time.sleep(0.1)
        child.terminate()
        try:
            return child.wait(END_MARGIN_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def drain_node(address: str, node_id: str, notice: Notice) -> None:
    """Tell Ray that the node goes: it starts nothing there any more, and drivers can see it.

    Raises:
        RaymegaError: Ray refuses.
    """
    from ray.core.generated import autoscaler_pb2

    reasons = autoscaler_pb2.DrainNodeReason  # type: ignore[attr-defined]  # generated, without stubs
    reason = reasons.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int(time.time_ns() / 1e6 + notice.seconds * 1000)
    client = gcs_client(address)
    is_accepted, why = client.drain_node(node_id, reason, notice.reason, deadline_ms)
    if not is_accepted:
        raise RaymegaError(
            Fault(
                fact=f"Ray refuses to drain node {node_id!r}: {why}",
                rule="the node must be one of the cluster's that lives",
                remedy="give --node-id, or the --address of the cluster that this machine is in",
            )
        )


def find_node(address: str) -> str:
    """Id of the living node with this machine's address.

    Raises:
        RaymegaError: There is none, or several are.
    """
    mine = _own_address(address)
    nodes = gcs_client(address).get_all_node_info(timeout=10).values()
    alive = [n.node_id.hex() for n in nodes if n.state == 0 and n.node_manager_address == mine]
    if len(alive) != 1:
        raise RaymegaError(
            Fault(
                fact=f"{len(alive)} living Ray nodes have this machine's address {mine}",
                rule="the agent must know which node goes",
                remedy="give --node-id",
            )
        )
    return str(alive[0])


def _own_address(address: str) -> str:
    """This machine's on the way to ``host:port``; nothing is sent."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
