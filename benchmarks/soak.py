"""Flatness of a long run: memory, descriptors, threads and disk of all its processes, with deaths in between.

A small job trains for 20,000 steps under the driver of `raymega train`, with metrics.jsonl, MLflow, snapshots in
memory and a spare. The last rank's process is killed every 1,000 steps; rank 0's, the driver's and Ray's live on.
Samples are taken between deaths. The steps fall into windows of 5,000; the first is left out, as caches fill in it.
Of each number the median of a window may exceed that of the window before by 1 %, or by what one sample varies.
It prints a table of the medians, and ends with exit code 1 if a number grows.

    python -m benchmarks.soak [--steps 20000] [--set tracking.mlflow_uri=off]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

from raymega.api import train
from raymega.config.load import parse_job
from raymega.events import AttemptStarted, Recovered, RunEvent, StepFinished, WorkersStarted

JOB = Path(__file__).parents[1] / "jobs" / "verify.yaml"
WINDOWS, SAMPLES = 4, 10
"""Windows of a run, and samples in each."""
DEATHS = 5
"""Deaths in a window."""
CALM_SHARE = 0.25
"""Share of the steps between two deaths that must have passed since the last one when a sample is taken."""
MOST_GROWTH = 0.01
"""Largest growth of a median from one window to the next."""
FLOORS = {"MiB": 1.0, "descriptors": 1.0, "threads": 1.0, "processes": 1.0}
"""Growth that one sample varies by, by unit."""
RECORD_BYTES, FIRST_RECORDS_BYTES = 2_000, 20e6
"""Most bytes a step of records, which grow with the run by intent: 2 GB for a million steps; and of the first steps."""
MIB = 2.0**20
KINDS = {  # by words of a command line
    "raylet": ("raylet/raylet",),
    "gcs_server": ("gcs_server",),
    "dashboard": ("dashboard/dashboard.py",),
    "agents": ("agent.py", "/agent/main.py", "runtime_env/agent"),
    "log and signal monitors": ("log_monitor.py", "monitor.py"),
    "snapshot servers": ("SnapshotServer", "snapshots"),
}
NAMED = ("driver", "rank 0")
"""Processes that live on, whose threads are told by name."""
RAYS_OWN = ("raylet", "gcs_server", "dashboard", "agents", "log and signal monitors")
"""Processes whose growth is shown, but does not count."""


@dataclass
class Soak:
    """A sink that kills the last rank now and then, and samples all processes of the run between deaths."""

    folder: Path
    steps: int
    pids: dict[int, int] = field(default_factory=dict)
    table: dict[tuple[str, str], list[tuple[int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    names: dict[str, list[Counter[str]]] = field(default_factory=lambda: defaultdict(list))
    num_deaths: int = 0
    num_recoveries: int = 0
    since: int = 0
    step: int = 0
    begun_s: float = field(default_factory=time.monotonic)

    def emit(self, event: RunEvent) -> None:
        """See Sink."""
        match event:
            case AttemptStarted():
                self.since = 0
            case WorkersStarted():
                self.pids = dict(event.pids)
            case Recovered():
                self.num_recoveries += 1
            case StepFinished() if event.step > self.step:
                self.step, self.since = event.step, self.since + 1
                self._act()

    def close(self, timeout_s: float) -> None:
        """Nothing to flush."""

    def _act(self) -> None:
        window = self.steps // WINDOWS
        calm = int(CALM_SHARE * window / DEATHS)
        if self.step % max(1, window // SAMPLES) == 0 and self.since >= min(calm, 10):
            self._sample()
        if self.step >= (self.num_deaths + 1) * window / DEATHS and self.since > calm:
            os.kill(self.pids[max(self.pids)], signal.SIGKILL)
            self.num_deaths, self.since = self.num_deaths + 1, -(10**9)

    def _sample(self) -> None:
        """Add a row of each kind of process, and of the folders."""
        driver = psutil.Process()
        number = 0
        counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for process in (driver, *driver.children(recursive=True)):
            try:
                with process.oneshot():
                    kind = self._kind(process, driver)
                    counts[kind]["MiB"] += process.memory_info().rss / MIB
                    counts[kind]["descriptors"] += process.num_fds()
                    counts[kind]["threads"] += process.num_threads()
                    if kind in NAMED:
                        self.names[kind].append(threads_of(process.pid))
            except psutil.Error:  # it has just ended
                continue
            number += 1
        counts["all"]["processes"] = number
        records = [self.folder / "mlflow.db", *self.folder.rglob("metrics*.jsonl")]
        known = sum(path.stat().st_size for path in records if path.exists())
        counts["disk: the run's folder"]["MiB"] = (size_below(self.folder) - known) / MIB
        counts["disk: records"]["MiB"] = known / MIB
        for kind, row in counts.items():
            for unit, value in row.items():
                self.table[kind, unit].append((self.step, value))

    def _kind(self, process: psutil.Process, driver: psutil.Process) -> str:
        if process.pid == driver.pid:
            return "driver"
        ranks = {pid: rank for rank, pid in self.pids.items()}
        if process.pid in ranks:
            # the other ranks' processes are new after each death
            return "rank 0" if ranks[process.pid] == 0 else "other ranks"
        line = " ".join(process.cmdline())
        return next(
            (kind for kind, words in KINDS.items() if any(word in line for word in words)),
            "spares and others",
        )

    def medians(self, values: list[tuple[int, float]]) -> list[float]:
        """Return the median of each window that has samples."""
        window = self.steps / WINDOWS
        parts = [
            [value for step, value in values if number * window < step <= (number + 1) * window]
            for number in range(WINDOWS)
        ]
        return [statistics.median(part) for part in parts if part]

    def show(self) -> bool:
        """Print the table, and return whether every number is flat."""
        spent_s, window = time.monotonic() - self.begun_s, self.steps // WINDOWS
        print(
            f"{self.step} steps in {spent_s:.0f} s, {self.num_deaths} deaths, {self.num_recoveries} recoveries; "
            f"medians of {WINDOWS} windows of {window} steps; load {os.getloadavg()[0]:.0f}"
        )
        print(f"{'':28}{'':12}{'medians by window':40}growth a window after the first")
        are_flat = True
        for (kind, unit), values in sorted(self.table.items()):
            found = self.medians(values)
            cells = " ".join(f"{each:9.1f}" for each in found)
            if kind == "disk: records":
                most = FIRST_RECORDS_BYTES + RECORD_BYTES * self.step
                is_flat = found[-1] * MIB <= most
                growth = f"{found[-1] * MIB / self.step:.0f} bytes a step"
            else:
                is_flat, growth = is_flat_from(found[1:], FLOORS[unit])
            is_ours = kind not in RAYS_OWN
            are_flat &= is_flat or not is_ours
            verdict = "" if is_flat else "  GROWS" if is_ours else "  grows, Ray's own"
            print(f"{kind:28}{unit:12}{cells:40}{growth}{verdict}")
        for kind, found in sorted(self.names.items()):
            more, fewer = found[-1] - found[0], found[0] - found[-1]
            print(
                f"{kind}: threads at the end, not at the begin: {dict(more)}; and the other way: {dict(fewer)}"
            )
        return are_flat


def is_flat_from(medians: list[float], floor: float) -> tuple[bool, str]:
    """Return whether each of ``medians`` exceeds the one before by little, and the largest growth as text."""
    pairs = [*pairwise(medians)]
    if not pairs:
        return True, "one window"
    worst = max(after - before for before, after in pairs)
    share = max((after - before) / before if before else 0.0 for before, after in pairs)
    is_flat = all(after - before <= max(MOST_GROWTH * before, floor) for before, after in pairs)
    return is_flat, f"{100 * share:+.2f} % ({worst:+.1f})"


def threads_of(pid: int) -> Counter[str]:
    """Return how many threads of each name a process has; those that have just ended count nothing."""
    found: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(OSError):
            found[path.read_text().strip()] += 1
    return found


def size_below(folder: Path) -> int:
    """Return the bytes of all files below ``folder``; files that vanish meanwhile count nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            total += path.stat().st_size if path.exists() else 0
    return total


def main() -> int:
    """Run the job, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--set", action="append", default=[], help="a field of the job")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [
            "run.name=soak", f"run.steps={options.steps}", f"checkpoint.uri={folder}",
            f"checkpoint.every={max(10, options.steps // 200)}", "checkpoint.keep_last=3",
            f"tracking.mlflow_uri=sqlite:///{folder}/mlflow.db", "parallel.pp=1", "parallel.dp=2",
            "data.global_batch_size=4", "schedule.micro_batch_size=2", "elastic.snapshot_every=10",
            "elastic.spares=1", "elastic.max_failures=1000", "cluster.cpus_per_worker=0.5",
            *options.set,
        ]  # fmt: skip
        soak = Soak(folder=folder, steps=options.steps)
        train(parse_job(JOB, settings).job(), address="local", sinks=[soak])
        return 0 if soak.show() else 1


if __name__ == "__main__":
    sys.exit(main())
