"""The node agent, which turns a machine's preemption notice into a drain of its Ray node.

It runs beside a node's Ray, or as the parent of ``ray start --block``. As the parent it receives
Kubernetes' SIGTERM first and passes it on when the run has had time to leave. The driver decides what a
drain means for a run.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Event
from types import FrameType

from raymega.errors import RaymegaError
from raymega.orchestrate.cluster.preemption_notices import Ask, Notice
from raymega.ray_private import gcs_client

log = logging.getLogger(__name__)

POLL_S = 5.0
"""Interval between polls in seconds; AWS, which gives two minutes of notice, recommends 5 s."""
END_MARGIN_S = 3.0
"""Part of the grace period that is reserved for Ray's own shutdown, in seconds."""


@dataclass(kw_only=True)
class NodeAgent:
    """The agent of one node.

    Attributes:
        address: ``host:port`` of the cluster's head.
        ask: Function that polls the cloud for a notice.
        node_id: Ray's id of the node; '' finds the one with this machine's address.
        command: Command that starts Ray as a child of this process; may be empty.
        grace_s: Grace period of this process after a SIGTERM, in seconds.
        poll_s: Interval between polls, in seconds.
    """

    address: str
    ask: Ask
    node_id: str = ""
    command: Sequence[str] = ()
    grace_s: float = 30.0
    poll_s: float = POLL_S
    _told: Event = field(default_factory=Event)

    def run(self) -> int:
        """Wait until the child ends, or drain the node on a notice and wait; return the exit code."""
        child = subprocess.Popen(self.command) if self.command else None
        before = signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            # wait for a notice, drain, and leave the run its time
            notice = self._wait_for_notice(child)
            if notice is None:
                return child.returncode if child else 0
            until_s = time.monotonic() + max(0.0, notice.seconds - END_MARGIN_S)
            self._drain(notice, until_s)
            return self._see_off(child, until_s)
        # whatever happened, leave no child behind
        finally:
            signal.signal(signal.SIGTERM, before)
            if child is not None and child.poll() is None:
                child.terminate()

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._told.set()

    def _wait_for_notice(self, child: subprocess.Popen[bytes] | None) -> Notice | None:
        """Return the notice when it comes, or None when the child has ended without one."""
        asked_s = -self.poll_s
        while child is None or child.poll() is None:
            # a SIGTERM is noticed within 0.2 s, the cloud is asked every poll_s
            if self._told.wait(min(0.2, self.poll_s)):
                return Notice(seconds=self.grace_s, reason="this machine got a SIGTERM")
            if time.monotonic() - asked_s >= self.poll_s:
                asked_s = time.monotonic()
                if (notice := self.ask()) is not None:
                    return notice
        return None

    def _drain(self, notice: Notice, until_s: float) -> None:
        """Drain the node; a failure is logged and tried again, as the machine is taken away in any case."""
        from ray.exceptions import RayError

        while True:
            try:
                node_id = self.node_id or find_node(self.address)
                drain_node(self.address, node_id, notice)
            except (RaymegaError, RayError, RuntimeError, OSError) as error:
                log.warning("the node could not be drained: %s", error)
            else:
                log.warning(
                    "node %s leaves in %.0f s: %s", node_id[:8], notice.seconds, notice.reason
                )
                return
            # the head may be restarting, or busy
            left_s = until_s - time.monotonic() - self.poll_s
            if left_s <= 0:
                return
            time.sleep(self.poll_s)
            notice = replace(notice, seconds=left_s + END_MARGIN_S)

    def _see_off(self, child: subprocess.Popen[bytes] | None, until_s: float) -> int:
        """Wait so that runs can leave, then end Ray and return its exit code."""
        # no child: Ray is another process's to end; a SIGTERM ends the wait
        if child is None:
            self._told.wait(max(0.0, until_s - time.monotonic()))
            return 0
        # leave the runs their time
        while time.monotonic() < until_s and child.poll() is None:
            time.sleep(0.1)
        # end Ray
        child.terminate()
        try:
            return child.wait(END_MARGIN_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def drain_node(address: str, node_id: str, notice: Notice) -> None:
    """Mark the node as draining: Ray schedules nothing new there, and drivers can see the deadline.

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
            fact=f"Ray refuses to drain node {node_id!r}: {why}",
            rule="the node must be one of the cluster's that lives",
            remedy="give --node-id, or the --address of the cluster that this machine is in",
        )


def find_node(address: str) -> str:
    """Return the id of the live node with this machine's address.

    Raises:
        RaymegaError: No live node has it, or several have.
    """
    mine = _own_address(address)
    nodes = gcs_client(address).get_all_node_info(timeout=10).values()
    # state 0 is ALIVE in Ray's GcsNodeInfo
    alive = [n.node_id.hex() for n in nodes if n.state == 0 and n.node_manager_address == mine]
    if len(alive) != 1:
        raise RaymegaError(
            fact=f"{len(alive)} living Ray nodes have this machine's address {mine}",
            rule="the agent must know which node goes",
            remedy="give --node-id",
        )
    return str(alive[0])


def _own_address(address: str) -> str:
    """Return this machine's address on the route to ``host:port``; nothing is sent."""
    host, _, port = address.rpartition(":")
    # connecting a UDP socket only chooses the route
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
