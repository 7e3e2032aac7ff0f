"""A copy of the repository in which mistakes are planted one at a time, and what its tests say to each.

The working tree is only read. Bytecode is compiled once and checked by the hash of its source, since two mistakes of
one length within a second would look alike to a check by time and size.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO
from unittest.mock import patch

from raymega.verify import launch
from raymega.verify.launch import ForkServer
from tests.mutations.mutation import Mutation
from tests.mutations.planted import PACKAGE, planted_text
from tests.support.preloaded import Forked, nursery

ROOT = Path(__file__).parents[2]
COPIED = (
    "raymega",
    "tests",
    "jobs",
    "benchmarks",
    "docs",
    "dashboards",
    "cluster",
    "pyproject.toml",
    "README.md",
)
VERDICTS = {0: "passed", 1: "failed", 2: "not run", 3: "not run", 4: "not run", 5: "passed"}
"""Exit codes of pytest by what they say: a test failed, a module did not load, pytest failed, an id is unknown, or all
that the files have is wide."""
PYTEST = """
import os, sys
os.dup2(2, 1)
folder, *arguments = sys.argv[1:]
os.chdir(folder)
os.environ["PYTHONPATH"] = folder
sys.path.insert(0, folder)
from tests.support.fork_servers import fork_early
fork_early()
import pytest
sys.exit(pytest.main(arguments))
"""
"""Runs pytest in a copy, in a process that has torch loaded already, and so has its fork server of ranks."""


class Tree:
    """A copy of the repository, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=ignore)
            else:
                shutil.copy2(ROOT / name, folder / name)
        # tests are not changed, and pytest keeps its own bytecode of them
        command = [
            sys.executable,
            "-m",
            "compileall",
            "-q",
            "--invalidation-mode",
            "checked-hash",
            "raymega",
        ]
        subprocess.run(command, cwd=folder, check=True)

    @contextmanager
    def planted(self, file: str, text: str) -> Iterator[None]:
        """Give ``file`` of the package other source, for as long as the body runs."""
        path = self.folder / "raymega" / file
        healthy = path.read_text()
        path.write_text(text)
        try:
            yield
        finally:
            path.write_text(healthy)

    def verdict(self, tests: Sequence[str], *options: str, timeout_s: float) -> tuple[str, str]:
        """Run tests, and return ``passed``, ``failed``, ``not run`` or ``late``, and the end of what pytest wrote."""
        command = [
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--no-header",
            "--disable-warnings",
            "--tb=line",
            *options,
            *tests,
        ]
        with tempfile.TemporaryFile("w+") as log:
            process = nursery().start(PYTEST, [str(self.folder), *command], stderr=log)
            process.stdin.close()
            process.stdout.close()
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return "late", f"more than {timeout_s:g} s"
            finally:
                # the ranks too, which are of its session
                _kill_session(process.pid)
            log.seek(0)
            said = log.read()
        end = "\n".join(said.strip().splitlines()[-8:])
        # a mistake that ends the interpreter, as memory that is freed too early does
        if code < 0:
            return "failed", f"ended by {signal.Signals(-code).name}\n{end}"
        if code in VERDICTS:
            return VERDICTS[code], end
        raise RuntimeError(f"pytest ended with {code}: {' '.join(command)}\n{said}")


@contextmanager
def fork_server_of(
    mutation: Mutation | None, *, timeout_s: float, is_compiled: bool = False
) -> Iterator[ForkServer]:
    """Start the fork server of `raymega verify` in a process that has torch, on the package with the mistake.

    Without ``is_compiled`` torch.compile returns the functions that it is given: a formula is as wrong, and a
    compiler takes up to a minute.
    """
    begin = "from tests.mutations.planting import plant; plant(*sys.argv[2:]); "
    planted = [str(PACKAGE), mutation.file, planted_text(mutation)] if mutation else []

    def start(command: Sequence[str], *, stderr: IO[str], **_pipes: object) -> Forked:
        _, _, code, folder = command
        first, rest = code.split("; from raymega", 1)
        code = f"{first}; {begin if planted else ''}from raymega{rest}"
        with patch.dict(os.environ, {} if is_compiled else {"TORCHDYNAMO_DISABLE": "1"}):
            return nursery().start(code, [folder, *planted], stderr=stderr)

    # pipes, text and a session of its own are what it starts with
    with (
        patch.object(launch, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start})),
        launch.open_fork_server(timeout_s=timeout_s) as fork_server,
    ):
        yield fork_server


def _kill_session(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
