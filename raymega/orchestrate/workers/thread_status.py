"""Reads the position of a training thread from another thread, and the state of another process.

It reads Python frames and /proc, so being probed costs the training thread nothing.
``driver/hang_detector.py`` interprets the result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from types import FrameType

from raymega.orchestrate.core.worker_group_api import ThreadStatus

INSTRUCTION = ("raymega.pipeline.executor", "_carry_out", "task")
OPERATION = ("raymega.parallel.comm.work", "wait", "self")
"""Module, function and local variable that hold the present instruction, and the collective waited for."""
PATIENT = (
    "raymega.checkpoint", "raymega.data", "raymega.storage", "raymega.train.save_schedule",
    "torch._dynamo", "torch._inductor",
)  # fmt: skip
"""Modules that wait for a disk, a store or a compiler, and limit these waits themselves."""
PROC = Path("/proc")
MAX_FRAMES = 6
RUNNING, STOPPED = "R", "T"
UNKNOWN = ""


def thread_status_of(thread: Thread, *, rank: int, step: int) -> ThreadStatus:
    """Return the position of ``thread``; ``step`` is its number of completed steps."""
    frames = _frames(thread)
    state, cpu_s = _books(PROC / "self" / "task" / str(thread.native_id) / "stat")
    modules = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    return ThreadStatus(
        rank=rank,
        step=step,
        doing=_local(frames, INSTRUCTION),
        waits_for=_local(frames, OPERATION),
        is_patient=any(name.startswith(PATIENT) for name in modules),
        state=state,
        cpu_s=cpu_s,
        stack=tuple(_line(frame) for frame in frames[-MAX_FRAMES:]),
    )


def process_state(pid: int) -> str:
    """Return the state letter of a process on this machine; empty if it, or /proc, does not exist."""
    return _books(PROC / str(pid) / "stat")[0]


def _frames(thread: Thread) -> list[FrameType]:
    """Return the thread's frames, outermost first; none if it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _local(frames: Sequence[FrameType], location: tuple[str, str, str]) -> str:
    """Return the local variable of the innermost such frame as text; empty if there is none."""
    module, function, name = location
    for frame in reversed(frames):
        is_there = frame.f_code.co_name == function and frame.f_globals.get("__name__") == module
        if is_there and name in frame.f_locals:
            return str(frame.f_locals[name])
    return ""


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _books(path: Path) -> tuple[str, float]:
    """Return state letter and CPU seconds from a stat file of /proc; empty and 0 if it does not exist."""
    # fields after the command, which is in parentheses and may hold any character
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except OSError:
        return UNKNOWN, 0.0
    # utime and stime
    ticks = int(fields[11]) + int(fields[12])
    return fields[0], ticks / os.sysconf("SC_CLK_TCK")
