"""Identifies the process that holds a run's lease, and checks whether it is certainly gone.

Only the machine on which a process ran can tell that it is gone. From another machine, or for a process
that is stopped or cut off, only the lease's expiry helps.
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
"""State letters in /proc of a process that has ended but whose parent has not waited for it."""
STATE_FIELD, START_FIELD = 0, 19
"""Fields of /proc/PID/stat, counted after the process name, which may hold spaces and parentheses."""


def this_process() -> LeaseHolder:
    """Return this process as the holder of a lease, with a random token."""
    _, started = _state_and_start(os.getpid())
    return LeaseHolder(
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        started=started,
        token=uuid.uuid4().hex,
    )


def is_gone(holder: LeaseHolder) -> bool:
    """Return whether the process has certainly ended; False in case of doubt."""
    if holder.machine != _machine():
        return False
    # no such process
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # a process of another user, maybe with a reused pid
    # a zombie, or a later process with the same pid; /proc may hide what other users' processes are
    state, started = _state_and_start(holder.pid)
    return state in DEAD or started not in ("", holder.started)


def _machine() -> str:
    """Return an id of this boot and pid namespace; of the machine only where there is no /proc."""
    try:
        return f"{BOOT_ID.read_text().strip()} {PID_SPACE.readlink()}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state letter and start time in ticks since boot; empty if there is no /proc."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[STATE_FIELD], fields[START_FIELD]
