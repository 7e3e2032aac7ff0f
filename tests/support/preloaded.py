"""Processes that begin with other people's packages loaded and nothing of this repository's: forks of one that waits.

torch takes 1.5 s of a CPU to import and pydantic, pyarrow and transformers another second, which a test that needs
raymega imported anew need not spend again. The waiting process is this file, run as a script.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

PRELOADED = (
    "torch", "torch.distributed", "numpy", "pydantic", "yaml", "pyarrow.ipc", "isal.isal_zlib",
    "safetensors", "tokenizers", "jinja2.sandbox", "pytest", "hypothesis",
)  # fmt: skip
MOST_BYTES = 1 << 20
"""Longest request: code and environment."""


class Forked:
    """A started process, as far as a `subprocess.Popen` of its kind is used: with pipes, text and a session of its own."""

    def __init__(self, nursery: Nursery, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self._nursery, self.pid, self.stdin, self.stdout = nursery, pid, stdin, stdout

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or the negative number of the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        return self._nursery.exit_code(self.pid, timeout)

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The waiting process; it ends when this one does."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            mine.setsockopt(socket.SOL_SOCKET, side, MOST_BYTES)
        self._socket = mine
        self._ended: dict[int, int] = {}

    def start(self, code: str, args: Sequence[str], *, stderr: IO[Any]) -> Forked:
        """Run ``code`` as `python -c` does, in this process's folder and environment."""
        (stdin, to_child), (from_child, stdout) = os.pipe(), os.pipe()
        request = {"code": code, "args": args, "environ": dict(os.environ), "cwd": str(Path.cwd())}
        socket.send_fds(
            self._socket, [json.dumps(request).encode()], [stdin, stdout, stderr.fileno()]
        )
        os.close(stdin)
        os.close(stdout)
        while "started" not in (said := self._hear()):
            pass
        return Forked(self, said["started"], os.fdopen(to_child, "w"), os.fdopen(from_child))

    def exit_code(self, pid: int, timeout: float | None) -> int:
        """Wait for the end of a process; see :meth:`Forked.wait`."""
        end_s = None if timeout is None else time.monotonic() + timeout
        while pid not in self._ended:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            if not select.select([self._socket], [], [], left_s)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {pid}", timeout)
            self._hear()
        return self._ended[pid]

    def _hear(self) -> dict[str, int]:
        text = self._socket.recv(MOST_BYTES)
        if not text:
            raise RuntimeError(f"the waiting process ended: {self._process.wait()}")
        said: dict[str, int] = json.loads(text)
        if "ended" in said:
            self._ended[said["ended"]] = said["code"]
        return said


@functools.cache
def nursery() -> Nursery:
    """The one of this process."""
    return Nursery()


def _serve(requests: socket.socket) -> None:
    """Fork a process a request, and tell of each one's end, until the other side is closed."""
    for module in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    pids: dict[int, int] = {}
    while True:
        ready = select.select([requests, *pids], [], [])[0]
        for pidfd in [each for each in ready if each is not requests]:
            pid = pids.pop(pidfd)
            os.close(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            requests.send(json.dumps({"ended": pid, "code": code}).encode())
        if requests in ready:
            text, streams, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
            if not text:
                return
            pid = os.fork()
            if pid == 0:
                requests.close()
                _run(json.loads(text), streams)
            for stream in streams:
                os.close(stream)
            pids[os.pidfd_open(pid)] = pid
            requests.send(json.dumps({"started": pid}).encode())


def _run(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run a request in this process."""
    # what is loaded stays: no collection of garbage copies the pages that it shares with other processes
    gc.freeze()
    code = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(request["environ"])
        os.chdir(request["cwd"])
        sys.argv = ["-c", *request["args"]]
        exec(request["code"], {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as side:
        side.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MOST_BYTES)
        _serve(side)
