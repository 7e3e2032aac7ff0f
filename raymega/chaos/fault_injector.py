"""Inflicts faults on a run: signals to processes and nodes, trouble for its store and its MLflow.

All of it comes from outside, but for what only the worker itself can do: raise. When a fault comes is
not decided here; that it ends again, where it ends, is.
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
    """What a fault may hit: a worker's process, and the node that it is on."""

    pid: int
    node: str


@dataclass(kw_only=True)
class FaultInjector:
    """Everything that can be done to one run, and what must be undone later.

    Attributes:
        box: The cluster.
        driver: The run's driver.
        folder: The run's chaos folder.
        database: The run's MLflow file; it need not exist.
        num_nodes: What the cluster has when it is whole.
        hold_s: How long a service is in trouble, and how long a drained node has left.
        return_s: After how long a lost node is replaced; never when it is infinite.
    """

    box: Sandbox
    driver: DriverProcess
    folder: Path
    database: Path
    num_nodes: int
    hold_s: float
    return_s: float
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def inflict(self, kind: str, target: FaultTarget) -> str:
        """Do it; the answer that whoever waits at the gate is to get."""
        if kind == "raise":
            return RAISE
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
            with suppress(ProcessLookupError):  # it went by itself
                actions[kind](target)
        else:
            begin_trouble(self.folder, kind)
            self._do_later(self.hold_s, lambda: end_trouble(self.folder))
        return ""

    def undo_what_is_due(self) -> None:
        """End troubles, and bring nodes back."""
        now_s = time.monotonic()
        due = [action for at_s, action in self._later if at_s <= now_s]
        self._later = [(at_s, action) for at_s, action in self._later if at_s > now_s]
        for action in due:
            action()

    def undo(self) -> None:
        """End all troubles now; nodes stay lost."""
        end_trouble(self.folder)
        self._later.clear()

    def _do_later(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))

    def _lose_node(self, target: FaultTarget, how: Callable[[str], None]) -> None:
        """A node is lost by ``how``; later another one takes its place."""
        if target.node:
            if self.return_s < float("inf"):
                self._do_later(self.return_s, lambda: self.box.fill(self.num_nodes))
            how(target.node)

    def _drain_node(self, target: FaultTarget) -> None:
        """Ray is asked for drains once a second, and a tiny job does tens of steps in that."""
        slow_down(self.folder)
        if target.node:
            self.box.drain(target.node, seconds=self.hold_s)
            self._do_later(self.hold_s, lambda: self._lose_node(target, self.box.kill))

    def _lock_database(self, _target: FaultTarget) -> None:
        """As long as another process holds the lock, the run's own writes are refused."""
        self.database.parent.mkdir(parents=True, exist_ok=True)
        lock = sqlite3.connect(self.database, timeout=LOCK_TIMEOUT_S, isolation_level=None)
        with suppress(sqlite3.OperationalError):
            lock.execute("BEGIN EXCLUSIVE")
        self._do_later(self.hold_s, lock.close)
