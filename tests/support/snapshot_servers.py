"""Snapshot servers (memory servers) in processes of their own, and the memory that a process takes."""

import multiprocessing
import os
from contextlib import ExitStack, contextmanager
from pathlib import Path

from raymega.storage.memory_server import MemoryStoreServer, give_memory_back

TOKEN = "token"
SPAWN = multiprocessing.get_context("spawn")


def _keep(answers) -> None:
    give_memory_back()
    server = MemoryStoreServer("127.0.0.1", TOKEN)
    answers.put((os.getpid(), server.uri))
    server.wait()


@contextmanager
def server_processes(number):
    """Yield the pid and the address of each of ``number`` snapshot servers."""
    answers = SPAWN.Queue()
    with ExitStack() as stack:
        for _ in range(number):
            process = SPAWN.Process(target=_keep, args=(answers,), daemon=True)
            process.start()
            # called in reverse order: kill, then join
            stack.callback(process.join)
            stack.callback(process.kill)
        yield [answers.get(timeout=300) for _ in range(number)]


def memory_of(pid) -> int:
    """Return the proportional set size (PSS) of anonymous and shared memory, in bytes."""
    rows = (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines()
    parts = dict(row.split(":") for row in rows[1:])
    return sum(1024 * int(parts[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
