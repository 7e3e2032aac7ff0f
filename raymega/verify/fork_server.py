"""Fork server: a process that has imported torch and forks the ranks of one layout at a time.

A forked rank starts in milliseconds, where a new process takes seconds to import torch. The server
reads one JSON request a line and answers each with one line. Its parent is `launch.py`'s ForkServer;
it ends when its stdin closes.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raymega.plan.run_plan import read_plan
from raymega.train.environment import load_lazy_parts
from raymega.verify.results import failure_path
from raymega.verify.worker import score_rank, train_rank

GRACE_S = 10.0
"""Seconds that other ranks get after one has failed, to report their own errors."""
TURN_S = 0.01
COLLECTIVE_SHARE = 0.75
WORK: Mapping[str, Callable[..., None]] = {"train": train_rank, "score": score_rank}
"""Function of a rank by the request's `work`."""


def main(folder: str) -> None:
    """Serve requests from stdin until it closes; output of libraries goes to stderr.

    The parent removes ``folder``; the server does so if the parent was killed.
    """
    parent = os.getppid()
    try:
        _serve()
    finally:
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)


def _serve() -> None:
    # Answers use a copy of stdout; descriptor 1 becomes stderr, so that no print breaks the protocol.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests = os.fdopen(
        0, "rb", buffering=0, closefd=False
    )  # unbuffered, so that select sees all input
    while line := requests.readline():
        reply = {"late": _run_layout(json.loads(line))}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _run_layout(request: Mapping[str, Any]) -> list[int]:
    """Run all ranks of a request to their end; return the ranks that had to be killed."""
    plan = read_plan(request["plan"])
    # once here, and not in each rank; but with CUDA open here, no rank could open it after its fork
    if plan.job.cluster.device == "cpu":
        load_lazy_parts(plan, "cpu")
    # fork one process a rank
    ranks = {_fork(rank, request): rank for rank in range(request["world_size"])}
    deadline = time.monotonic() + request["timeout_s"]
    try:
        # wait; a failure shortens the deadline
        while ranks and time.monotonic() < deadline:
            if _reap(ranks):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            _leave_if_alone()
        return sorted(ranks.values())
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(rank: int, request: Mapping[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    # in the child: die with the server, work, and leave by os._exit without the parent's clean-up
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    folder, code = Path(request["folder"]), 1
    try:
        timeout_s = request["timeout_s"] * COLLECTIVE_SHARE
        WORK[request["work"]](
            rank, request["plan"], folder, timeout_s=timeout_s, **request["options"]
        )
        code = 0
    except BaseException as error:  # noqa: BLE001  # the edge of the process: it becomes a text
        text = f"{traceback.format_exc()}\n{_in_one_line(error)}"
        failure_path(folder, rank).write_text(text, encoding="utf-8")
    os._exit(code)


def _in_one_line(error: BaseException) -> str:
    """Return an error's class, text and notes in one line."""
    said = (f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()))
    return " ".join("; ".join(said).split())


def _reap(ranks: dict[int, int]) -> bool:
    """Remove the ranks that ended, and return whether any of them failed."""
    is_any_failed = False
    for pid in list(ranks):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del ranks[pid]
            is_any_failed |= status != 0
    return is_any_failed


def _leave_if_alone() -> None:
    """Wait TURN_S; exit if stdin is readable, which while ranks run means that the parent is gone."""
    readable, _, _ = select.select([0], [], [], TURN_S)
    if readable:
        raise SystemExit(1)


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
