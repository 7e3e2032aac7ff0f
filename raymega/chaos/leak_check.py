"""What a run should have cleared away when it is over: actors, slots, processes, half-written files.

A process that is gone holds no port and no thread. What a killed process had half written stays for a day,
so that no living writer loses its file (storage.local): such files count only when none was killed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from raymega.chaos.driver_process import DriverOutput
from raymega.chaos.processes import is_alive
from raymega.chaos.sandbox import Sandbox
from raymega.storage.local import PARTIAL_FOLDER

PATIENCE_S = 15.0


def find_leftovers(
    box: Sandbox, output: Sequence[DriverOutput], *, driver: int, run: Path | None
) -> list[str]:
    """After some time for it to go; by a word each.

    Args:
        box: The cluster, on which nothing else runs.
        output: All that the run's drivers said.
        driver: Pid of the last of them.
        run: The run's folder, if it may hold no half-written file.
    """
    workers = [e.event["pids"].values() for e in output if e.name == "workers"]
    pids = {driver, *(pid for started in workers for pid in started)}
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := _left(box, pids, run)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def forget_gates(folder: Path) -> None:
    """Chaos clears up after itself."""
    shutil.rmtree(folder, ignore_errors=True)


def _left(box: Sandbox, pids: set[int], run: Path | None) -> list[str]:
    partial = run / PARTIAL_FOLDER if run else None
    files = sorted(path.name for path in partial.iterdir()) if partial and partial.is_dir() else []
    return [
        *box.leftovers(),
        *(f"process {pid}" for pid in sorted(pids) if is_alive(pid)),
        *(f"half-written file {name}" for name in files),
    ]
