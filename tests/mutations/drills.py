"""Planted mistakes that a run under faults shows, and the drill that must turn red for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DrillMutation:
    """A row: ``old`` in the package's ``file`` becomes ``new``.

    Attributes:
        name: What is wrong.
        file: Path in the package.
        old: Text that stands in the file exactly once.
        new: What takes its place.
        fault: What ``raymega chaos`` does to the run.
        caught: What one of the verdict's sentences has.
    """

    name: str
    file: str
    old: str
    new: str
    fault: str
    caught: str


DRILL_MUTATIONS = (
    DrillMutation(
        name="a recovered run trains on its last batch again",
        file="train/state.py",
        old="        samples=samples,\n",
        new="        samples=samples - 16,\n",
        fault="kill-worker@4",
        caught="samples were seen instead of",
    ),
    DrillMutation(
        name="a recovered run takes the lost step for done",
        file="train/state.py",
        old="        step=step,\n",
        new="        step=step + 1,\n",
        fault="kill-worker@4",
        caught="are not each there once",
    ),
)
