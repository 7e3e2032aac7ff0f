"""Faults that the tests inject: every kind in every legal phase, and runs of two faults by pairwise coverage."""

from random import Random

from raymega.chaos.faults import KINDS, STEP_PHASES, ChaosFault

NUM_CANDIDATES = 50
"""Draws for each run of two faults, of which the best is taken."""


def legal_cells(*, has_network: bool = False) -> list[tuple[str, str]]:
    """Return all legal (kind, phase), either of kinds that need a network or of the others."""
    kinds = {kind: facts for kind, facts in KINDS.items() if facts.needs_network == has_network}
    return [(kind, phase) for kind, facts in kinds.items() for phase in facts.phases]


def covering_pairs(*, seed: int, size: int) -> list[list[ChaosFault]]:
    """Return ``size`` runs of two faults each that cover as many pairs of values as possible.

    The values are the first fault's kind and phase and the second's kind and phase; a pair is two of
    them in different places. Greedy, as all pairwise tools are: of some candidates drawn by ``seed``
    the one with the most pairs that no run has had yet.
    """
    draw = Random(seed)
    # a second fault has no use for that phase, which comes only after a loss
    cells = [cell for cell in legal_cells() if cell[1] != "replan"]
    seen: set[tuple[int, str, int, str]] = set()
    runs = []
    for _ in range(size):
        candidates = [(*draw.choice(cells), *draw.choice(cells)) for _ in range(NUM_CANDIDATES)]
        best = max(candidates, key=lambda values: len(_pairs(values) - seen))
        # covered: later runs are chosen for other pairs
        seen |= _pairs(best)
        runs.append(_run_of_two(*best))
    return runs


def _pairs(values: tuple[str, str, str, str]) -> set[tuple[int, str, int, str]]:
    places = range(len(values))
    return {(i, values[i], j, values[j]) for i in places for j in places if i < j}


def _run_of_two(kind: str, phase: str, kind2: str, phase2: str) -> list[ChaosFault]:
    """Return both faults, with a kill between them if the second needs a new attempt and the first causes none."""
    first = ChaosFault(kind=kind, phase=phase, at=3 if phase in STEP_PHASES else 1)
    second = ChaosFault(kind=kind2, phase=phase2, at=6 if phase2 in STEP_PHASES else 1)
    if KINDS[kind].ends_attempt or phase2 in STEP_PHASES:
        return [first, second]
    return [first, ChaosFault(kind="kill-worker", phase="step", at=4), second]
