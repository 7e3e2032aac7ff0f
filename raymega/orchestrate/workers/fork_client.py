"""Program that Ray starts in place of a Python interpreter for a worker: it lets the fork server fork one.

`python -IS fork_client.py SOCKET WORKER.py ARGUMENTS` sends its arguments, environment and open files to the
fork server (`fork_server.py`) and ends. Without an answer it becomes the interpreter that Ray would have
started. Only the standard library is imported, and little of it: this takes 20 ms.
"""

import json
import os
import socket
import sys

OUTPUTS = (0, 1, 2)
"""File descriptors that the forked worker takes over."""


def main(address: str, command: list[str]) -> None:
    """Hand ``command`` to the fork server at ``address``, or run it in this process instead."""
    worker = _without_setup(command)
    if not (worker and _is_forked(address, worker)):
        os.execv(sys.executable, [sys.executable, *command])


def _without_setup(command: list[str]) -> list[str]:
    """Return the worker's own program and arguments, without Ray's setup program; [] if that has work to do."""
    if not command[0].endswith("setup_worker.py"):
        return command
    has_environment = any(word.startswith("--serialized-runtime-env-context") for word in command)
    return [] if has_environment else [w for w in command[1:] if not w.startswith("--language")]


def _is_forked(address: str, command: list[str]) -> bool:
    """Return whether the server has forked a worker for ``command``; it answers with the worker's pid."""
    with open("/proc/self/oom_score_adj") as file:  # noqa: PTH123  # pathlib takes half of the time
        oom_score_adj = file.read()
    request = {
        "command": command,
        "environment": dict(os.environ),  # noqa: TID251  # all of it is the worker's
        "folder": os.getcwd(),  # noqa: PTH109
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score_adj": oom_score_adj,
    }
    body = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address)
            socket.send_fds(server, [len(body).to_bytes(8, "little")], OUTPUTS)
            server.sendall(body)
            return bool(server.recv(32))
        except OSError:
            return False


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
