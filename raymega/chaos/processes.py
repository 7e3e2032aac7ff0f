"""Facts on processes of this machine from /proc: parents, memory, threads, open files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Resources of a run's processes after a recovery.

    Attributes:
        driver_bytes: Resident memory of the driver in bytes.
        driver_threads: Number of threads of the driver.
        driver_files: Number of open files and connections of the driver.
        worker_bytes: Resident memory of each worker in bytes, by pid.
    """

    driver_bytes: int
    driver_threads: int
    driver_files: int
    worker_bytes: Mapping[int, int]


def look_at(driver: int, workers: tuple[int, ...]) -> Memory:
    """Return the resources of the driver and the workers with these pids."""
    return Memory(
        driver_bytes=resident_bytes(driver),
        driver_threads=_num_entries(driver, "task"),
        driver_files=_num_entries(driver, "fd"),
        worker_bytes={pid: resident_bytes(pid) for pid in workers},
    )


def parent_of(pid: int) -> int:
    """Return the pid of the parent of ``pid``; 0 when ``pid`` is gone."""
    with suppress(*_GONE):
        return int(_status(pid)[1])
    return 0


def is_alive(pid: int) -> bool:
    """Return whether a process is alive; a zombie is not."""
    with suppress(*_GONE):
        return _status(pid)[0] not in "ZX"
    return False


def children_of(pid: int) -> list[int]:
    """Return the pids of the living children of ``pid``."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [child for child in pids if parent_of(child) == pid] if pid else []


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process; 0 when it is gone."""
    with suppress(*_GONE):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the name before may hold spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _num_entries(pid: int, folder: str) -> int:
    with suppress(*_GONE):
        return sum(1 for _ in Path(f"/proc/{pid}/{folder}").iterdir())
    return 0
