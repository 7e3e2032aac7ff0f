"""Times of commands from a fresh process: help, plan, and a run up to its first finished step.

Seconds are from the start of the command: to its first output, and to its first finished step or else its
end. CPU seconds are of the command and all processes that it has started until then, by kind of process,
read from /proc. With --against FOLDER each round also runs the commands of another checkout, in alternating
order, and the medians of the pairs' ratios are printed.

    python -m benchmarks.start_up [--rounds 10] [--commands help plan ranks2 ranks8] [--against FOLDER]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from threading import Thread

from benchmarks.measure import median

HERE = Path(__file__).parents[1]
JOB = "jobs/verify.yaml"
SHORT = {"help": ("--help",), "plan": ("plan", JOB)}
GRIDS = {"ranks2": (), "ranks8": ("--set", "parallel.tp=2", "--set", "parallel.dp=2")}
LOOK_EVERY_S = 0.05
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
KINDS = {
    "gcs_server": "Ray", "raylet/raylet": "Ray", "dashboard": "Ray", "runtime_env/agent": "Ray",
    "log_monitor": "Ray", "autoscaler": "Ray", "fork_server": "workers", "ray::": "workers",
    "default_worker": "workers",
}  # fmt: skip
"""Kind of a process by a part of its command line; every other one belongs to the driver."""


@dataclass(kw_only=True)
class Start:
    """Seconds of one command: to its first output, until it is done, and of CPUs until then by kind."""

    first_s: float = 0.0
    done_s: float = 0.0
    cpu_s: Counter[str] = field(default_factory=Counter)
    last_line: str = ""

    @property
    def all_cpu_s(self) -> float:
        """CPU seconds of all processes."""
        return sum(self.cpu_s.values())


class CpuMeter:
    """CPU seconds of all processes below this one, by kind; one that has ended keeps its last reading."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[str, float]] = {}
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")

    def read(self) -> Counter[str]:
        """Read /proc once, and return the CPU seconds so far by kind."""
        parents, seconds = {}, {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid = int(entry.name)
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                # parent, and user and system ticks
                parents[pid] = int(fields[1])
                seconds[pid] = (int(fields[11]) + int(fields[12])) * self._tick_s
        for pid in _below(os.getpid(), parents):
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                kind = next((kind for part, kind in KINDS.items() if part in line), "driver")
                # a zombie has no command line any more: keep its kind
                kind = kind if line else self._seconds.get(pid, ("driver", 0.0))[0]
                self._seconds[pid] = kind, seconds[pid]
        sums: Counter[str] = Counter()
        for kind, number in self._seconds.values():
            sums[kind] += number
        return sums


def _below(root: int, parents: dict[int, int]) -> Iterator[int]:
    """Yield the pids of all descendants of ``root``."""
    children = defaultdict(list)
    for pid, parent in parents.items():
        children[parent].append(pid)
    todo = [root]
    while todo:
        below = children[todo.pop()]
        yield from below
        todo += below


def measure(name: str, checkout: Path) -> Start:
    """Run the command ``name`` of a checkout once, to its end."""
    with tempfile.TemporaryDirectory() as folder:
        words = SHORT.get(name) or (
            "train", JOB, "--json", "--address", "local", "--set", f"checkpoint.uri={folder}",
            *GRIDS[name],
        )  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        start, meter, before = Start(), CpuMeter(), getrusage(RUSAGE_CHILDREN)
        begun_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "raymega", *words],
            cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        reader = Thread(target=_read, args=(process, start, begun_s))
        reader.start()
        while reader.is_alive():
            # readings stop at the first finished step
            if name in GRIDS and not start.done_s:
                start.cpu_s = meter.read()
            reader.join(LOOK_EVERY_S)
        if process.wait():
            raise SystemExit(f"{name} in {checkout}: {process.returncode}, {start.last_line}")
    if name in SHORT:
        # short commands end before a meter could look: take the kernel's sum
        after = getrusage(RUSAGE_CHILDREN)
        start.done_s = time.perf_counter() - begun_s
        start.cpu_s["driver"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    _reap()
    return start


def _read(process: subprocess.Popen[str], start: Start, begun_s: float) -> None:
    """Note when the first line and the first finished step come."""
    assert process.stdout
    for line in process.stdout:
        start.last_line = line.strip()
        start.first_s = start.first_s or time.perf_counter() - begun_s
        if line.startswith('{"event": "step"'):
            start.done_s = start.done_s or time.perf_counter() - begun_s


def _reap() -> None:
    """Collect the processes of an ended command that outlived it by a moment."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass


def show(name: str, starts: dict[str, list[Start]]) -> None:
    """Print the medians of one command, and of the pairs' ratios if there are two sides."""
    row: dict[str, object] = {"name": name, "load": os.getloadavg()[0]}
    for side, samples in starts.items():
        kinds = sorted({kind for sample in samples for kind in sample.cpu_s})
        figures = {
            "first_s": median([sample.first_s for sample in samples]).value,
            "done_s": median([sample.done_s for sample in samples]).value,
            "cpu_s": median([sample.all_cpu_s for sample in samples]).value,
            **{f"cpu_s {kind}": median([s.cpu_s[kind] for s in samples]).value for kind in kinds},
        }
        row[side] = {key: round(value, 3) for key, value in figures.items()}
        text = "  ".join(f"{key} {value:6.2f}" for key, value in figures.items())
        print(f"{name:7} {side:6} {text}  ({len(samples)} runs, load {os.getloadavg()[0]:.0f})")
    if len(starts) == 2:
        ours, theirs = starts.values()
        for what in ("done_s", "all_cpu_s"):
            ratios = [
                getattr(b, what) / getattr(a, what) for a, b in zip(ours, theirs, strict=True)
            ]
            print(f"{name:7} {what}: theirs / ours {(found := median(ratios))}")
            row[f"{what} ratio"] = [found.value, found.low, found.high]
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--commands", nargs="+", choices=(*SHORT, *GRIDS), default=(*SHORT, *GRIDS))
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    options = parser.parse_args()
    # orphans become our children, so that the meter finds them
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sides = {"ours": HERE} | ({"theirs": options.against.resolve()} if options.against else {})
    for name in options.commands:
        starts: dict[str, list[Start]] = {side: [] for side in sides}
        for number in range(options.rounds):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            for side in order:
                starts[side].append(measure(name, sides[side]))
        show(name, starts)


if __name__ == "__main__":
    main()
