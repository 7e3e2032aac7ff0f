"""The driver's process as chaos sees it: what it says and when, and starting it again.

It knows nothing of faults. Lines are stamped by a thread of their own as they come.
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
    """A line of the driver: when it came, and what it says."""

    at_s: float
    event: Mapping[str, Any]  # lines of JSON

    @property
    def name(self) -> str:
        """Which event."""
        return str(self.event["event"])


@dataclass(kw_only=True)
class DriverProcess:
    """One command, started as often as it takes.

    Attributes:
        command: What to run.
        errors: Where its stderr goes.
        output: All lines so far, of all its processes.
        begun_s: When each process was started.
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
        """Of the process that runs now, or ran last."""
        assert self._process, "it was started"
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, when it has ended and everything that it said was heard."""
        assert self._process and self._reader, "it was started"
        code = self._process.poll()
        return None if code is None or self._reader.is_alive() or not self._lines.empty() else code

    def start(self) -> None:
        """Run the command, again if it has ended."""
        self.begun_s.append(time.monotonic())
        with self.errors.open("a") as errors:
            self._process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self._process.stdout, "it is a pipe"
        self._reader = Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def read_output(self) -> list[DriverOutput]:
        """Lines that came since the last call."""
        new = []
        while not self._lines.empty():
            new.append(self._lines.get())
        self.output += new
        return new

    def signal(self, number: int) -> None:
        """To the process, if it lives."""
        assert self._process, "it was started"
        self._process.send_signal(number)

    def end(self) -> None:
        """Leave no process."""
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
    """What runs a job under chaos."""
    return [sys.executable, "-m", DRIVER, str(job_file), address, *overrides]
