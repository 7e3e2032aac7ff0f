"""Record of a rehearsal: timestamped output, measured figures by name, and waits with a time limit."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable

from rehearsal.hosts import Host

NOISE = re.compile(r"VINFO|VVINFO|Permanently added|Shared connection|sending incremental|^sent |"
                   r"total size is|\.bashrc: No such file|Ignoring upload|^$")  # fmt: skip


class Record:
    """The rehearsal's clock and its findings."""

    def __init__(self) -> None:
        """The clock starts now."""
        self._start = time.monotonic()
        self.figures: dict[str, float | str] = {}

    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{self.now():6.1f} s  {text}", flush=True)

    def note(self, name: str, value: float | str) -> None:
        """Keep a figure."""
        self.figures[name] = round(value, 1) if isinstance(value, float) else value
        self.say(f"-- {name}: {self.figures[name]}")

    def wait(self, what: str, is_done: Callable[[], bool], *, limit_s: float) -> float:
        """Ask until the answer is yes; the seconds that took."""
        started = self.now()
        while not is_done():
            if self.now() - started > limit_s:
                raise RuntimeError(f"{what}: not within {limit_s:g} s")
            time.sleep(0.2)
        return self.now() - started

    def dump(self) -> str:
        """The figures as one line of JSON."""
        return json.dumps(self.figures)


class Command:
    """Running command on a machine, whose output is read line by line."""

    def __init__(self, host: Host, text: str, record: Record, *, is_shown: bool = True) -> None:
        """Start it."""
        record.say(f"{host.name}$ {text}")
        self.lines: list[tuple[float, str]] = []
        self._record, self._is_shown = record, is_shown
        self.process = subprocess.Popen(host.command(text), stdout=subprocess.PIPE, text=True,
                                        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            # colours are for terminals
            text = re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip())
            if NOISE.search(text):
                continue
            self.lines.append((self._record.now(), text))
            if self._is_shown:
                self._record.say(f"  {text}")

    def find(self, pattern: str, *, after_s: float = 0.0) -> float | None:
        """Return the time of the first line that matches ``pattern`` after ``after_s``, or None."""
        found = (at for at, text in list(self.lines) if at > after_s and re.search(pattern, text))
        return next(found, None)

    def wait_for(self, pattern: str, *, after_s: float = 0.0, limit_s: float) -> float:
        """Wait for a line; when it came."""
        self._record.wait(f"'{pattern}'", lambda: self._has(pattern, after_s), limit_s=limit_s)
        return self.find(pattern, after_s=after_s)

    def _has(self, pattern: str, after_s: float) -> bool:
        if self.find(pattern, after_s=after_s) is not None:
            return True
        # ended, and every line is read: it will not come any more
        if self.process.poll() is not None and not self._reader.is_alive():
            raise RuntimeError(f"ended with {self.process.returncode} before '{pattern}'")
        return False

    def end(self, *, limit_s: float) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(limit_s)
        # the last lines may come after the exit code
        self._reader.join(10)
        return code


def run(host: Host, text: str, record: Record, *, limit_s: float, is_shown: bool = True) -> Command:
    """Run a command to its end and insist on success."""
    command = Command(host, text, record, is_shown=is_shown)
    code = command.end(limit_s=limit_s)
    # the end of the output says why, also of commands that are not shown
    if code:
        tail = "\n".join(line for _, line in command.lines[-20:])
        raise RuntimeError(f"{host.name}$ {text}: exit code {code}\n{tail}")
    return command
