"""Runs `raymega train --json` as a user does: a process whose lines are read as they come."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERIFY = Path(__file__).parents[2] / "jobs" / "verify.yaml"


@dataclass
class Outcome:
    """Result of a command: exit code, events and stderr."""

    code: int
    events: list[dict] = field(default_factory=list)
    stderr: str = ""

    def all(self, name: str) -> list[dict]:
        """Return the events of one name."""
        return [event for event in self.events if event["event"] == name]

    @property
    def losses(self) -> dict[int, float]:
        """Return the loss by step; of a recomputed step, the last one."""
        return {event["step"]: event["loss"] for event in self.all("step")}


class Running:
    """Handle of a running command, with which a watcher of its events can send signals."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self.pids: dict[str, int] = {}
        self.nodes: dict[str, str] = {}
        self.attempt = 0
        self.last: dict = {}

    def kill_worker(self, rank: int) -> None:
        os.kill(self.pids[str(rank)], signal.SIGKILL)

    def signal_driver(self, number: int) -> None:
        self._process.send_signal(number)


RAYMEGA = [sys.executable, "-c", "from raymega.cli.main import run; run()"]


def raymega(*words: str, timeout: float = 300) -> subprocess.CompletedProcess:
    """The command with ``words``, to its end."""
    return subprocess.run(
        [*RAYMEGA, *words], capture_output=True, text=True, timeout=timeout, check=False
    )


def train(
    *overrides: str,
    address: str,
    on_step: Callable[[Running, int], None] = lambda _running, _step: None,
    on_stderr: Callable[[str], None] = lambda _line: None,
    timeout: float = 500,
    job: Path = VERIFY,
) -> Outcome:
    """``raymega train`` of the verify job; ``on_step`` sees each step as soon as it is printed.

    ``on_stderr`` sees each line of the standard error, from another thread.
    """
    command = [*RAYMEGA, "train", str(job), "--json", "--address", address]
    for override in overrides:
        command += ["--set", override]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    # the loop below reads lines, which have no timeout
    watchdog = threading.Timer(timeout, process.kill)
    watchdog.start()
    errors: list[str] = []

    def read_stderr() -> None:
        for line in process.stderr:
            errors.append(line)
            on_stderr(line)

    # both pipes are read at once, or a full one would stop the command
    drain = threading.Thread(target=read_stderr, daemon=True)
    drain.start()
    running, events = Running(process), []
    try:
        for line in process.stdout:
            event = json.loads(line)
            events.append(event)
            # of the newest attempt: a watcher kills by rank, not by pid
            if event["event"] == "workers":
                running.pids, running.nodes = event["pids"], event["nodes"]
            if event["event"] == "step":
                running.attempt, running.last = event["attempt"], event
                on_step(running, event["step"])
        code = process.wait(timeout)
    finally:
        watchdog.cancel()
        process.kill()
    # what was printed last may be the cause of the end
    drain.join(60)
    return Outcome(code=code, events=events, stderr="".join(errors))


def runs_in(folder: Path, address: str, *common: str) -> Callable[..., Outcome]:
    """Return ``train`` of runs by their name and further overrides, in one folder and on one cluster, with ``common`` ones."""

    def start(name: str, *more: str, **options: Any) -> Outcome:
        settings = (f"run.name={name}", f"checkpoint.uri={folder}", *common, *more)
        return train(*settings, address=address, **options)

    return start
