"""`raymega schedule NAME --json` of every schedule that there is, in a few shapes each."""

from __future__ import annotations

from raymega.schedule.table import SCHEDULES
from tests.golden.commands import called
from tests.golden.folding import fold
from tests.golden.scratch import scratch

SHAPES = ((2, 1, 3), (3, 1, 5), (2, 2, 4), (3, 2, 3), (2, 3, 4))
"""pp, chunks, micro-batches; of those that a schedule can have, so many:"""
NUM_SHAPES = 3


def shapes_of(name: str) -> list[tuple[int, int, int]]:
    """The first ones that are legal."""
    kind = SCHEDULES[name]
    legal = [shape for shape in SHAPES if kind.least_chunks <= shape[1] <= kind.most_chunks]
    return legal[:NUM_SHAPES]


def file_names() -> list[str]:
    """One file a schedule."""
    return [f"schedules/{name}.txt" for name in sorted(SCHEDULES)]


def texts() -> dict[str, str]:
    """What the command prints, a line an instruction."""
    with scratch():
        made = [
            "".join(_printed(name, *shape) for shape in shapes_of(name))
            for name in sorted(SCHEDULES)
        ]
    return dict(zip(file_names(), made, strict=True))


def _printed(name: str, pp: int, chunks: int, micro_batches: int) -> str:
    sizes = ("--pp", str(pp), "--chunks", str(chunks), "--micro-batches", str(micro_batches))
    ended = called("schedule", name, *sizes, "--json")
    assert ended.code == 0, ended.stderr
    return f"$ raymega schedule {name} {' '.join(sizes)} --json\n{fold(ended.stdout, depth=3)}"
