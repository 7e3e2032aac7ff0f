"""FaultInjector injects faults into a run: signals to processes and nodes, failures of its store and MLflow.

All faults come from outside except `raise`, which the worker does itself. `chaos/chaos_run.py` decides when a fault
is injected; faults that last a time are ended here.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from raymega.chaos.driver_process import DriverProcess
from raymega.chaos.faulty_store import begin_trouble, end_trouble
from raymega.chaos.phase_barriers import RAISE, slow_down
from raymega.chaos.sandbox import Sandbox

LOCK_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultTarget:
    """Target of a fault: the pid of a worker, and the id of its node."""

    pid: int
    node: str


@dataclass(kw_only=True)
class FaultInjector:
    """Injector of all kinds of faults into one run.

    Attributes:
        box: Cluster of the run.
        driver: Driver process of the run.
        folder: Folder of the run's gates and store faults.
        database: Path of the run's MLflow database; it need not exist.
        num_nodes: Number of nodes of the complete cluster.
        hold_s: Duration of a service fault, and notice of a drained node, in seconds.
        return_s: Seconds until a lost node is replaced; infinite for never.
    """

    box: Sandbox
    driver: DriverProcess
    folder: Path
    database: Path
    num_nodes: int
    hold_s: float
    return_s: float
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def inject(self, kind: str, target: FaultTarget) -> str:
        """Inject a fault of ``kind`` and return the answer for the worker that waits at the gate."""
        if kind == "raise":
            return RAISE
        # faults of processes, nodes and MLflow
        actions: Mapping[str, Callable[[FaultTarget], None]] = {
            "kill-worker": lambda at: os.kill(at.pid, signal.SIGKILL),
            "hang": lambda at: os.kill(at.pid, signal.SIGSTOP),
            "kill-node": lambda at: self._lose_node(at, self.box.kill),
            "freeze-node": lambda at: self._lose_node(at, self.box.freeze),
            "link-down": lambda at: self._lose_node(at, self.box.cut_off),
            "drain-node": self._drain_node,
            "kill-driver": lambda _: self.driver.signal(signal.SIGKILL),
            "stop-driver": lambda _: self.driver.signal(signal.SIGTERM),
            "mlflow-down": self._lock_database,
        }
        if kind in actions:
            with suppress(ProcessLookupError):  # the process has ended already
                actions[kind](target)
        else:
            # faults of the store, which the run's own processes simulate
            begin_trouble(self.folder, kind)
            self._do_later(self.hold_s, lambda: end_trouble(self.folder))
        return ""

    def undo_what_is_due(self) -> None:
        """End the faults whose time is over, and replace lost nodes."""
        # An action may schedule further ones: take the due ones out first.
        now_s = time.monotonic()
        due = [action for at_s, action in self._later if at_s <= now_s]
        self._later = [(at_s, action) for at_s, action in self._later if at_s > now_s]
        for action in due:
            action()

    def undo(self) -> None:
        """End all service faults now; lost nodes are not replaced."""
        end_trouble(self.folder)
        self._later.clear()

    def _do_later(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))

    def _lose_node(self, target: FaultTarget, how: Callable[[str], None]) -> None:
        """Lose the node by ``how``, and schedule its replacement."""
        if target.node:
            if self.return_s < float("inf"):
                self._do_later(self.return_s, lambda: self.box.fill(self.num_nodes))
            how(target.node)

    def _drain_node(self, target: FaultTarget) -> None:
        """Drain the node and kill it at the deadline.

        Steps are slowed down: the driver polls Ray for drains once a second, in which a tiny job would do
        tens of steps.
        """
        slow_down(self.folder)
        if target.node:
            self.box.drain(target.node, seconds=self.hold_s)
            self._do_later(self.hold_s, lambda: self._lose_node(target, self.box.kill))

    def _lock_database(self, _target: FaultTarget) -> None:
        """Lock MLflow's database for ``hold_s`` seconds, so that the run's writes are refused."""
        self.database.parent.mkdir(parents=True, exist_ok=True)
        lock = sqlite3.connect(self.database, timeout=LOCK_TIMEOUT_S, isolation_level=None)
        with suppress(sqlite3.OperationalError):
            lock.execute("BEGIN EXCLUSIVE")
        self._do_later(self.hold_s, lock.close)
