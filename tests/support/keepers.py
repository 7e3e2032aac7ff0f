"""Keepers in processes of their own, and what they and others take of the machine's memory."""

import multiprocessing
import os
from contextlib import ExitStack, contextmanager
from pathlib import Path

from raymega.storage.memory_server import MemoryStoreServer, give_memory_back

TOKEN = "token"
SPAWN = multiprocessing.get_context("spawn")


def _keep(answers) -> None:
    give_memory_back()
    keeper = MemoryStoreServer("127.0.0.1", TOKEN)
    answers.put((os.getpid(), keeper.uri))
    keeper.wait()


@contextmanager
def keeper_processes(number):
    """The process id and the address of each of so many."""
    answers = SPAWN.Queue()
    with ExitStack() as stack:
        for _ in range(number):
            process = SPAWN.Process(target=_keep, args=(answers,), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        yield [answers.get(timeout=300) for _ in range(number)]


def memory_of(pid) -> int:
    """Bytes of a process's own, and of what it shares with others its part."""
    rows = (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines()
    parts = dict(row.split(":") for row in rows[1:])
    return sum(1024 * int(parts[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
