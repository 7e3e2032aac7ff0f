"""ForkServer: what a forked worker inherits and what is its own, and workers without a server."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from raymega.chaos.processes import is_alive
from raymega.orchestrate.workers.fork_server import LOG_FILE, ForkServer

# A worker's program: it notes what it is, and ends when its file `end` is there.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
facts = {
    "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "arguments": sys.argv[1:], "folder": os.getcwd(),
    "environment": dict(os.environ), "has_entry": "wave" in sys.modules, "has_ray": "ray" in sys.modules,
    "niceness": os.getpriority(os.PRIO_PROCESS, 0), "name": __name__,
    "sigchld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    "threads": len(os.listdir("/proc/self/task")),
}
print("hello from", os.getpid(), flush=True)
(folder / f"{sys.argv[2]}.part").write_text(json.dumps(facts))
(folder / f"{sys.argv[2]}.part").rename(folder / f"{sys.argv[2]}.json")
while not (folder / "end").exists():
    time.sleep(0.01)
"""
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    server = ForkServer("wave", log_dir=tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@pytest.fixture
def server(shared_server, tmp_path):
    """A server of job 01, whose workers of this test end with the test."""
    yield shared_server
    (tmp_path / "end").touch()


def wait_for(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found


def start(server, folder, name, *, job="01", setup=(), preexec=None):
    """Start a worker as a raylet does, and return its client's process and the facts that it noted."""
    (folder / "worker.py").write_text(WORKER)
    command = [
        *shlex.split(server.py_executable()),
        *setup,
        str(folder / "worker.py"),
        str(folder),
        name,
    ]
    environment = {
        "PATH": os.environ["PATH"],
        "RAY_JOB_ID": job,
        "RAY_RAYLET_PID": "7",
        "OWN": name,
    }
    with (folder / f"{name}.out").open("w") as out:
        client = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=out, stderr=out, preexec_fn=preexec
        )
    noted = folder / f"{name}.json"
    wait_for(noted.exists)
    return client, json.loads(noted.read_text())


def test_workers_are_forked_and_have_what_their_clients_had(server, tmp_path):
    workers = {name: start(server, tmp_path, name) for name in ("a", "b")}
    for name, (client, facts) in workers.items():
        assert client.wait(LIMIT_S) == 0
        assert facts["parent"] == server._process.pid
        assert facts["pid"] != client.pid
        assert facts["group"] == facts["pid"], "a raylet kills the group of a worker that has died"
        assert facts["has_entry"]
        assert facts["has_ray"]
        assert facts["arguments"] == [str(tmp_path), name]
        assert facts["folder"] == str(tmp_path)
        assert facts["environment"]["OWN"] == name
        assert "HOME" not in facts["environment"]
        assert facts["name"] == "__main__"
        assert facts["sigchld"]
        assert (tmp_path / f"{name}.out").read_text() == f"hello from {facts['pid']}\n"


def test_a_worker_keeps_its_niceness(server, tmp_path):
    _, facts = start(server, tmp_path, "a", preexec=lambda: os.nice(1))
    assert facts["niceness"] == os.getpriority(os.PRIO_PROCESS, 0) + 1


def test_rays_setup_program_is_left_out_where_it_has_nothing_to_do(server, tmp_path):
    _, facts = start(server, tmp_path, "a", setup=("/nowhere/setup_worker.py",))
    assert facts["parent"] == server._process.pid


def test_a_worker_of_another_job_loads_for_itself(server, tmp_path):
    start(server, tmp_path, "a")  # whoever comes first decides
    client, facts = start(server, tmp_path, "b", job="02")
    assert facts["pid"] == client.pid
    assert facts["environment"]["RAY_JOB_ID"] == "02"


def test_workers_outlive_the_server_and_later_ones_load_for_themselves(tmp_path):
    server = ForkServer("wave", log_dir=tmp_path / "logs")
    _, first = start(server, tmp_path, "a")
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait(LIMIT_S)
    client, second = start(server, tmp_path, "b")
    assert second["pid"] == client.pid
    assert is_alive(first["pid"])
    (tmp_path / "end").touch()
    server.close()


def test_a_server_that_cannot_load_the_entry_is_done_without(tmp_path):
    server = ForkServer("no.such.module", log_dir=tmp_path)
    client, facts = start(server, tmp_path, "a")
    assert facts["pid"] == client.pid
    assert "No module named 'no'" in (tmp_path / LOG_FILE).read_text()
    (tmp_path / "end").touch()
    server.close()


def test_the_server_ends_with_its_driver(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from raymega.orchestrate.workers.fork_server import ForkServer\n"
        f"server = ForkServer('wave', log_dir=Path({str(tmp_path)!r}))\n"
        "server.py_executable(); print(server._process.pid, flush=True); sys.stdin.read()"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with driver:
        pid = int(driver.stdout.readline())
        driver.kill()
    wait_for(lambda: not is_alive(pid))


def test_nothing_is_started_before_it_is_asked_for(tmp_path):
    server = ForkServer("wave", log_dir=tmp_path / "logs")
    server.close()
    assert not (tmp_path / "logs").exists()
