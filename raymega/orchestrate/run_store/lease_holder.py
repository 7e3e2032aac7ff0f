"""Which process holds a run, and whether it is gone for certain.

A process can be seen to be gone only from the machine that it ran on. From anywhere else, and of a
process that is stopped or cut off, nobody can tell: that is what a lease's expiry is for.
"""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from raymega.checkpoint.format.epochs import LeaseHolder

PROC = Path("/proc")
BOOT_ID = PROC / "sys" / "kernel" / "random" / "boot_id"
PID_SPACE = PROC / "self" / "ns" / "pid"
DEAD = ("Z", "X")
"""States of a process that has ended and that nobody has collected yet."""
STATE_FIELD, START_FIELD = 0, 19
"""Fields of /proc/PID/stat behind the name, which is in parentheses and may hold anything."""


def this_process() -> LeaseHolder:
    """The driver that asks."""
    _, started = _state_and_start(os.getpid())
    return LeaseHolder(
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        started=started,
        token=uuid.uuid4().hex,
    )


def is_gone(holder: LeaseHolder) -> bool:
    """The process has ended, and this machine knows; False wherever there is doubt."""
    if holder.machine != _machine():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # somebody's, and perhaps another one's by now
    state, started = _state_and_start(holder.pid)
    return state in DEAD or started != holder.started


def _machine() -> str:
    """Empty parts where there is no /proc: then a reboot shows by the process numbers alone."""
    try:
        return f"{BOOT_ID.read_text().strip()} {PID_SPACE.readlink()}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _state_and_start(pid: int) -> tuple[str, str]:
    """Letter of its state, and its start in ticks since the boot; empty where there is no /proc."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[STATE_FIELD], fields[START_FIELD]
