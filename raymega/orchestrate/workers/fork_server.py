"""Fork server of the driver's node: one process loads torch and Ray once, and forks Ray's workers.

A forked worker begins in milliseconds and shares the memory of loaded code, where a new one takes three
seconds of CPU time to import it. Ray starts `fork_client.py` for each worker, whose request the server
answers with a fork; the child then runs Ray's own worker program and is a worker like any other. The server
opens no connection, starts no thread and touches no accelerator, so that its children may.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raymega import ray_private
from raymega.orchestrate.workers import fork_client

BACKLOG = 1024
LOG_FILE = "fork-server.log"
CORE_VARIABLES = ("RAY_JOB_ID", "RAY_RAYLET_PID")
"""Variables that Ray's core reads once, when it is imported; workers of one server agree on them."""

Request = dict[str, Any]


class ForkServer:
    """The driver's handle of the server, which is started when its command is first asked for."""

    def __init__(self, entry: str, *, log_dir: Path) -> None:
        """Prepare the server; nothing is started.

        Args:
            entry: Name of the module that workers run; see worker_actor.EntryModule.
            log_dir: Folder of the server's output.
        """
        self._entry, self._log_dir = entry, log_dir
        self._folder = tempfile.TemporaryDirectory(prefix="raymega-fork-")  # only this user's
        self._address = str(Path(self._folder.name) / "socket")
        self._process: subprocess.Popen[bytes] | None = None

    def py_executable(self) -> str:
        """Return the command that Ray is to run in place of ``python`` for a worker on this node.

        The first call starts the server and returns at once; it loads while Ray starts.
        """
        if self._process is None:
            self._process = self._start()
        return shlex.join([sys.executable, "-IS", fork_client.__file__, self._address])

    def _start(self) -> subprocess.Popen[bytes]:
        # The server imports the same modules as this process, wherever they came from.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from {__name__} import main; main(*sys.argv[1:])"
        )
        self._log_dir.mkdir(parents=True, exist_ok=True)
        # clients may come before the server does, and wait in its socket
        with socket.socket(socket.AF_UNIX) as listener, (self._log_dir / LOG_FILE).open("w") as log:
            listener.bind(self._address)
            listener.listen(BACKLOG)
            return subprocess.Popen(
                [sys.executable, "-c", code, str(listener.fileno()), self._entry],
                pass_fds=(listener.fileno(),),
                stdin=subprocess.PIPE,  # closes with this process, and the server ends
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C reaches this process alone
            )

    def close(self) -> None:
        """End the server; its workers stay, and later ones load for themselves."""
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None
        self._folder.cleanup()


def main(listener: str, entry: str) -> None:
    """Serve at the socket of this file descriptor until stdin closes; in a forked process, run the worker."""
    gc.disable()  # loaded code stays, and a collection would copy shared pages
    importlib.import_module(entry)
    # None is the end of the server; a command is returned in a worker's process only
    command = _serve(socket.socket(fileno=int(listener)))
    if command is not None:
        runpy.run_path(command[0], run_name="__main__")


def _serve(listener: socket.socket) -> list[str] | None:
    """Answer requests until stdin closes; return the command of the worker in each forked process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    core: list[str | None] = []
    while True:
        readable, _, _ = select.select([listener.fileno(), 0], [], [])
        if 0 in readable:
            return None
        client, _ = listener.accept()
        with client:
            request, files = _receive(client)
            if request is None:
                continue
            mine = [request["environment"].get(name) for name in CORE_VARIABLES]
            if not core:
                core = mine
                _load_ray(request["environment"])
            is_alike = mine == core
            pid = os.fork() if is_alike else -1
            if pid == 0:
                listener.close()
                _become(request, files)
                return list(request["command"])
            for file in files:
                os.close(file)
            if is_alike:
                with suppress(OSError):
                    client.sendall(str(pid).encode())


def _receive(client: socket.socket) -> tuple[Request | None, Sequence[int]]:
    """Return a client's request and its files; no request where the client is gone."""
    try:
        head, files, _, _ = socket.recv_fds(client, 8, len(fork_client.OUTPUTS))
        with client.makefile("rb") as stream:
            body = stream.read(int.from_bytes(head, "little"))
        request = json.loads(body)
    except (OSError, ValueError):
        return None, ()
    return request, files


def _load_ray(environment: dict[str, str]) -> None:
    """Import what Ray's workers import, under the environment of the first one."""
    _set_environment(environment)
    ray_private.load_worker_program()
    importlib.import_module("raymega.orchestrate.workers.worker_actor")
    gc.freeze()


def _become(request: Request, files: Sequence[int]) -> None:
    """Give this process what Ray gave the client: files, environment, folder, arguments, priorities."""
    # As a worker that the raylet starts: it kills the process group of a worker that has died.
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.enable()
    for number, file in zip(fork_client.OUTPUTS, files, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    _set_environment(request["environment"])
    sys.argv[:] = request["command"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    with suppress(OSError):  # a raised score is refused in some sandboxes
        Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"], encoding="ascii")


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()  # noqa: TID251  # the worker's is the one that Ray gave its client
    os.environ.update(environment)  # noqa: TID251
