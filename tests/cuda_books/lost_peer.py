"""A rank whose peer is lost while it reads a step's totals: ``python -m tests.cuda_books.lost_peer``.

Each case is a process of its own, with torch's ProcessGroupNCCL and watchdog. No event completes any more, and the
host blocks in the read until the communicators are aborted. Then it reads zeros: no kernel has run. The rank must
end its attempt with CommunicationError, decide nothing, and be alive for the next one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cuda_books.build import build_device

LAYOUT = "tp8 sp"
TIMEOUT_S = 120
WITHIN_S = 10
"""elastic.collective_timeout_s of the ranks."""


@dataclass(frozen=True, slots=True)
class Case:
    """Something that goes wrong in a read.

    Attributes:
        wanted: Outcome: the error with its cause, or the end of the process.
        happen: Function that makes it go wrong, in the process that reads.
        environment: Variables that the user has set.
        is_checked: False to plant the mistake that the read is believed.
        lives_s: Seconds for which the process lives on, unless something ends it.
    """

    wanted: str
    happen: Callable[[], None]
    environment: dict[str, str]
    is_checked: bool = True
    lives_s: float = 4.0


def _peer_hangs() -> None:
    _device().books_hang()


def _peer_is_lost() -> None:
    _device().books_lose_peer()


def _driver_aborts() -> None:
    from raymega.train import entry

    _device().books_hang()
    threading.Timer(0.5, entry.abort).start()


def _device() -> Any:
    return ctypes.CDLL(None)


TORCH_DECIDES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
CASES = {
    "a peer hangs": Case("CommunicationError: an operation took longer than 10 s", _peer_hangs, {}),
    "a peer is lost": Case("CommunicationError: NCCL lost a peer", _peer_is_lost, {}),
    "the driver aborts": Case("CommunicationError: its attempt is over", _driver_aborts, {}),
    # planted: each must end otherwise
    "planted: torch's watchdog acts on the error": Case("ended by signal 6", _peer_is_lost, TORCH_DECIDES, lives_s=60.0),
    "planted: the read is believed": Case("no error", _driver_aborts, {}, is_checked=False),
}  # fmt: skip


def main() -> int:
    """Run every case; return 1 if one ends otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_books.lost_peer")
    parser.add_argument(
        "--build", type=Path, default=Path("build/cuda-books"), help="folder of the libraries"
    )
    environment = build_device(parser.parse_args().build.absolute())
    fault = False
    for name, case in CASES.items():
        found = _outcome(name, environment | case.environment)
        is_wanted = all(part in found for part in case.wanted.split(": "))
        fault |= not is_wanted
        print(f"{name}: {found}{'' if is_wanted else f' INSTEAD OF {case.wanted}'}", flush=True)
    return int(fault)


def _outcome(name: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "tests.cuda_books.lost_peer_rank", name]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    # a signal: torch's watchdog ends the process by one
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    if done.returncode:
        return "failed: " + " ".join(done.stderr.strip().splitlines()[-1:])
    return str(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
