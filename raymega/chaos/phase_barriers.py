"""Gates: barriers at which a worker waits in a given phase until a fault has been injected.

A gate is a file in the run's chaos folder. The first worker that it fits takes it by renaming it (NAME.taken),
announces itself (NAME.here) and waits for an answer (NAME.go). Both sides of the protocol are here.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from raymega.chaos.faults import STEP_PHASES

FOLDER = "chaos"
SLOW_FILE = "slow"
SLOW_STEP_S = 0.1
PATIENCE_S = 60.0
"""Maximum seconds that a worker waits for an answer, as the drill's process may be gone."""
LOOK_EVERY_S = 0.005
RAISE = "raise"
"""Answer that makes the worker raise an error; any other lets it continue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Barrier at a phase of a run.

    Attributes:
        name: Name of the file, without its suffix.
        phase: Phase of the run, one of PHASES in `chaos/faults.py`.
        at: First attempt or step that it fits.
        rank: Rank that it fits; -1 for any.
        below: World size below which a world must be; 0 for any.
    """

    name: str
    phase: str
    at: int
    rank: int = -1
    below: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Process that waits at a gate: pid, rank, attempt and step."""

    pid: int
    rank: int
    attempt: int
    step: int


def close_gate(folder: Path, gate: Gate) -> None:
    """Create the gate: the next worker that it fits will wait."""
    _write(folder / f"{gate.name}.gate", asdict(gate))


def arrival_at(folder: Path, name: str) -> Arrival | None:
    """Return the process that waits at the gate, or None."""
    path = folder / f"{name}.here"
    return Arrival(**json.loads(path.read_text())) if path.exists() else None


def open_gate(folder: Path, name: str, *, answer: str) -> None:
    """Release the process at the gate, with ``answer``."""
    _write(folder / f"{name}.go", {"answer": answer})


def slow_down(folder: Path) -> None:
    """Make each step SLOW_STEP_S longer, so that the run does not end before a fault is detected."""
    _write(folder / SLOW_FILE, {})


def begin_step(folder: Path) -> None:
    """Wait SLOW_STEP_S in a run that is slowed down."""
    if (folder / SLOW_FILE).exists():
        time.sleep(SLOW_STEP_S)


def wait_at(folder: Path, here: Arrival, *, phase: str, world_size: int) -> str:
    """Wait at a gate of ``phase``, and return its answer; '' at once if no gate fits."""
    gate = _take_gate(folder, here, phase=phase, world_size=world_size)
    if gate is None:
        return ""
    _write(folder / f"{gate.name}.here", asdict(here))
    answer, deadline_s = folder / f"{gate.name}.go", time.monotonic() + PATIENCE_S
    while not answer.exists() and time.monotonic() < deadline_s:
        time.sleep(LOOK_EVERY_S)
    return str(json.loads(answer.read_text())["answer"]) if answer.exists() else ""


def _take_gate(folder: Path, here: Arrival, *, phase: str, world_size: int) -> Gate | None:
    for path in sorted(folder.glob("*.gate")):
        try:
            gate = Gate(**json.loads(path.read_text()))
            if not _fits(gate, here, phase=phase, world_size=world_size):
                continue
            # A rename is atomic: only one worker takes the gate.
            path.rename(path.with_suffix(".taken"))
        except FileNotFoundError:  # another worker has taken it
            continue
        return gate
    return None


def _fits(gate: Gate, here: Arrival, *, phase: str, world_size: int) -> bool:
    if gate.phase != phase:
        return False
    if phase == "spawn":  # a starting process has no rank and no attempt yet
        return True
    reached = here.step if phase in STEP_PHASES else here.attempt
    is_small = gate.below == 0 or world_size < gate.below
    return gate.rank in (-1, here.rank) and reached >= gate.at and is_small


def _write(path: Path, values: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that the other side never reads a part.
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(values))
    partial.replace(path)
