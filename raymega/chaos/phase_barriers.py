"""Gates: places in a worker's life where it waits until chaos has done what it came for.

A gate is a file in the chaos folder of the run. The worker that it fits takes it, which one process
can, says that it is there, and waits for an answer. So a fault from outside meets a run in the
very phase that was asked for. Both sides are here; neither knows what happens meanwhile.
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
"""Longest that a worker waits for its answer; the watcher may be gone."""
LOOK_EVERY_S = 0.005
RAISE = "raise"
"""The one answer that means something: raise an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Where to wait.

    Attributes:
        name: Of the file, without its suffix.
        phase: See faults.PHASES.
        at: The first attempt or step that it fits.
        rank: Who waits; -1 for anybody.
        below: Only ranks of worlds that are smaller; 0 for any.
    """

    name: str
    phase: str
    at: int
    rank: int = -1
    below: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Who waits at a gate."""

    pid: int
    rank: int
    attempt: int
    step: int


def close_gate(folder: Path, gate: Gate) -> None:
    """From now on somebody has to wait there."""
    _write(folder / f"{gate.name}.gate", asdict(gate))


def arrival_at(folder: Path, name: str) -> Arrival | None:
    """Who waits there, if anybody does."""
    path = folder / f"{name}.here"
    return Arrival(**json.loads(path.read_text())) if path.exists() else None


def open_gate(folder: Path, name: str, *, answer: str) -> None:
    """Who waits may go on; ``answer`` is what it takes along."""
    _write(folder / f"{name}.go", {"answer": answer})


def slow_down(folder: Path) -> None:
    """From now on each step takes a while, so that the run is not over before a fault is seen."""
    _write(folder / SLOW_FILE, {})


def begin_step(folder: Path) -> None:
    """A step begins; in a run that is slowed down, later."""
    if (folder / SLOW_FILE).exists():
        time.sleep(SLOW_STEP_S)


def wait_at(folder: Path, here: Arrival, *, phase: str, world_size: int) -> str:
    """Pass ``phase``; the answer of a gate that was closed, '' where none was."""
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
            path.rename(path.with_suffix(".taken"))
        except FileNotFoundError:  # somebody else was faster
            continue
        return gate
    return None


def _fits(gate: Gate, here: Arrival, *, phase: str, world_size: int) -> bool:
    if gate.phase != phase:
        return False
    if phase == "spawn":  # a process that loads has no rank and no attempt
        return True
    reached = here.step if phase in STEP_PHASES else here.attempt
    is_small = gate.below == 0 or world_size < gate.below
    return gate.rank in (-1, here.rank) and reached >= gate.at and is_small


def _write(path: Path, values: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(values))
    partial.replace(path)
