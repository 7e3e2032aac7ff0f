"""When faults come: a list that was given, or draws from a seed at a mean time between failures. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from raymega.chaos.faults import KINDS, STEP_PHASES, ChaosFault, legal_cells

DRAWN = ("kill-worker", "raise", "kill-node", "store-errors", "store-slow", "kill-driver")
"""What comes by chance when nobody says what; hangs cost a timeout each and are asked for."""
NUM_CANDIDATES = 50
"""Draws for each run of two faults, of which the best is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledFault:
    """A fault at a time: ``after_s`` seconds after the one before was made good."""

    kind: str
    after_s: float
    rank: int


def draw_faults(
    *, mtbf_s: float, seed: int, world_size: int, kinds: Sequence[str] = DRAWN
) -> Iterator[ScheduledFault]:
    """Without end: exponential times of mean ``mtbf_s``, kinds and victims alike by chance."""
    draw = Random(seed)
    while True:
        yield ScheduledFault(
            kind=draw.choice(list(kinds)),
            after_s=draw.expovariate(1.0 / mtbf_s),
            rank=draw.randrange(world_size),
        )


def draw_victims(num_faults: int, *, seed: int, world_size: int) -> list[int]:
    """The rank of each fault of a list."""
    draw = Random(seed)
    return [draw.randrange(world_size) for _ in range(num_faults)]


def covering_pairs(*, seed: int, size: int) -> list[list[ChaosFault]]:
    """``size`` runs of two faults each that meet as many pairs of values as they can.

    The values are the first fault's kind and phase and the second's kind and phase; a pair is two of
    them in different places. Greedy, as all pairwise tools are: of some candidates drawn by ``seed``
    the one with the most pairs that no run has had yet.
    """
    draw = Random(seed)
    cells = [cell for cell in legal_cells() if cell[1] != "replan"]
    seen: set[tuple[int, str, int, str]] = set()
    runs = []
    for _ in range(size):
        candidates = [(*draw.choice(cells), *draw.choice(cells)) for _ in range(NUM_CANDIDATES)]
        best = max(candidates, key=lambda values: len(_pairs(values) - seen))
        seen |= _pairs(best)
        runs.append(_run_of_two(*best))
    return runs


def _pairs(values: tuple[str, str, str, str]) -> set[tuple[int, str, int, str]]:
    places = range(len(values))
    return {(i, values[i], j, values[j]) for i in places for j in places if i < j}


def _run_of_two(kind: str, phase: str, kind2: str, phase2: str) -> list[ChaosFault]:
    """A second fault in the start of an attempt needs one that begins; then a kill sees to that."""
    first = ChaosFault(kind=kind, phase=phase, at=3 if phase in STEP_PHASES else 1)
    second = ChaosFault(kind=kind2, phase=phase2, at=6 if phase2 in STEP_PHASES else 1)
    if KINDS[kind].ends_attempt or phase2 in STEP_PHASES:
        return [first, second]
    return [first, ChaosFault(kind="kill-worker", phase="step", at=4), second]
