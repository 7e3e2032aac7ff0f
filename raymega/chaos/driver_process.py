"""DriverProcess runs the driver as a child process, restarts it, and collects its events with their time.

A thread reads the events, so that their time is that of arrival.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TextIO

DRIVER = "raymega.chaos.driver_entry"


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverOutput:
    """Event of the driver, with its time of arrival on the monotonic clock in seconds."""

    at_s: float
    event: Mapping[str, Any]  # parsed JSON

    @property
    def name(self) -> str:
        """Return the name of the event, such as ``step``."""
        return str(self.event["event"])


@dataclass(kw_only=True)
class DriverProcess:
    """Command of the driver, and the processes that were started with it.

    Attributes:
        command: Arguments of the command.
        errors: File that collects stderr.
        output: Events read so far, of all its processes.
        begun_s: Start time of each process on the monotonic clock, in seconds.
    """

    command: Sequence[str]
    errors: Path
    output: list[DriverOutput] = field(default_factory=list)
    begun_s: list[float] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None
    _lines: queue.SimpleQueue[DriverOutput] = field(default_factory=queue.SimpleQueue)
    _reader: Thread | None = None

    @property
    def pid(self) -> int:
        """Return the pid of the current or last process."""
        assert self._process, "it was started"
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Return the exit code; None until the process has ended and all its events were read."""
        assert self._process and self._reader, "it was started"
        code = self._process.poll()
        return None if code is None or self._reader.is_alive() or not self._lines.empty() else code

    def start(self) -> None:
        """Start the command, also after an earlier process has ended."""
        self.begun_s.append(time.monotonic())
        with self.errors.open("a") as errors:
            self._process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self._process.stdout, "it is a pipe"
        self._reader = Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def read_output(self) -> list[DriverOutput]:
        """Return the events that arrived since the last call."""
        new = []
        while not self._lines.empty():
            new.append(self._lines.get())
        self.output += new
        return new

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is alive."""
        assert self._process, "it was started"
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill the process and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join()

    def _read(self, lines: TextIO) -> None:
        with lines:
            for line in lines:
                with suppress(ValueError):  # a killed driver tears its last line
                    self._lines.put(DriverOutput(at_s=time.monotonic(), event=json.loads(line)))


def driver_command(job_file: Path, address: str, overrides: Sequence[str]) -> list[str]:
    """Return the command that trains a job under chaos."""
    return [sys.executable, "-m", DRIVER, str(job_file), address, *overrides]
