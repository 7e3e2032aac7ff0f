"""A real head, as `ray start --head` makes it, on loopback and free ports, with its own token."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

from tests.support.servers.ports import free_port

BIN = Path(sys.executable).parent
START_TIMEOUT_S = 200.0


@dataclass(frozen=True)
class Head:
    """Addresses of a Ray head, and the environment variables for its clients."""

    address: str
    job_server: str
    env: dict[str, str]


@contextmanager
def head(num_cpus: int = 4) -> Iterator[Head]:
    """Start a head in its own process group, and kill that group at the end."""
    gcs, dashboard, *others = (free_port() for _ in range(5))
    env = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # another cluster's addresses must not reach the clients
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        env.pop(name, None)
    folder = Path(tempfile.mkdtemp(prefix="rmh"))
    flags = ("ray-client-server-port", "dashboard-agent-listen-port", "metrics-export-port")
    command = [str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--port={gcs}"]
    command += [f"--dashboard-port={dashboard}", f"--num-cpus={num_cpus}", f"--temp-dir={folder}"]
    command += [f"--{flag}={port}" for flag, port in zip(flags, others, strict=True)]
    with (folder / "start.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=env, start_new_session=True, cwd=folder
        )
    try:
        server = f"http://127.0.0.1:{dashboard}"
        _wait_for(server, env["RAY_AUTH_TOKEN"], process, folder / "start.log")
        yield Head(address=f"127.0.0.1:{gcs}", job_server=server, env=env)
    finally:
        _kill(process)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(server: str, token: str, process: subprocess.Popen, log: Path) -> None:
    request = Request(f"{server}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        # a head that ended will never answer
        assert process.poll() is None, log.read_text()
        with suppress(OSError), urlopen(request, timeout=20):
            return
        time.sleep(0.2)
    raise AssertionError(f"no job server after {START_TIMEOUT_S:g} s: {log.read_text()}")


def _kill(process: subprocess.Popen) -> None:
    """Kill a process and all its descendants, those in other process groups included."""
    family = _descendants(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(100)


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, in brackets, may hold anything; the parent is the second field behind it.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family, found = [root], [root]
    while found:
        found = [pid for pid, parent in parents.items() if parent in found]
        family += found
    return family[1:]
