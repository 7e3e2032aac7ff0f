"""Questions about snapshots that a snapshot server answers from its own objects.

The driver asks which ranks' shares are held, and decides. A rank asks for the boxes that meet its blocks. So
what is sent grows with a rank's own share. A store that cannot answer is read object by object.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from pydantic import TypeAdapter, ValidationError

from raymega.box import Box, SavedBox
from raymega.checkpoint.format.box_table import BoxTable
from raymega.checkpoint.format.keys import (
    ROOT,
    CheckpointId,
    checkpoint_of,
    folder_of,
    is_part,
    part_file,
    rank_of,
)
from raymega.checkpoint.snapshots.part import SnapshotPart, parse_part
from raymega.errors import CheckpointError
from raymega.storage.store import Store

NUM_PARTS_KEPT = 64
"""Parts that a snapshot server keeps parsed: those of two generations of a node and its partner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldShares:
    """The shares of one snapshot that a server holds.

    Attributes:
        attempt: Number of the attempt that wrote them.
        step: Completed steps.
        world_size: Number of shares that make the snapshot whole.
        grid: Degrees of the axes of the attempt's grid.
        state: Scalars of the trainer.
        ranks: Ranks whose part and data file are here, as ranges (first, last).
    """

    attempt: int
    step: int
    world_size: int
    grid: dict[str, int]
    state: dict[str, int | float | str]
    ranks: tuple[tuple[int, int], ...]

    @property
    def id(self) -> CheckpointId:
        """Identity of the snapshot."""
        return CheckpointId(attempt=self.attempt, step=self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxQuestion:
    """Question for the boxes of some ranks' shares that meet blocks, which are by saved name."""

    attempt: int
    step: int
    ranks: tuple[int, ...]
    blocks: dict[str, tuple[Box, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundBoxes:
    """Boxes that meet the blocks, of those ranks whose part could be read; and the trainer's scalars."""

    ranks: tuple[int, ...]
    boxes: tuple[SavedBox, ...]
    state: dict[str, int | float | str]


_HELD: TypeAdapter[tuple[HeldShares, ...]] = TypeAdapter(tuple[HeldShares, ...])
_QUESTION: TypeAdapter[BoxQuestion] = TypeAdapter(BoxQuestion)
_FOUND: TypeAdapter[FoundBoxes] = TypeAdapter(FoundBoxes)


@runtime_checkable
class AnswersQuestions(Protocol):
    """Optional method of a store: questions that its server answers."""

    def ask(self, question: str, about: object) -> Any:
        """Return the answer to ``question``; KeyError when the server does not know it."""


def ask_held(store: Store) -> tuple[HeldShares, ...]:
    """Return what ``store`` holds of each snapshot.

    Raises:
        StorageError: The snapshot server does not answer.
    """
    return _HELD.validate_python(_ask(store, "held", None))


def ask_boxes(store: Store, question: BoxQuestion) -> FoundBoxes:
    """Return the boxes that ``store`` finds.

    Raises:
        StorageError: The snapshot server does not answer.
    """
    about = _QUESTION.dump_python(question, mode="json")
    return _FOUND.validate_python(_ask(store, "boxes", about))


def _ask(store: Store, question: str, about: object) -> Any:
    if isinstance(store, AnswersQuestions):
        try:
            return store.ask(question, about)
        except KeyError:  # a server without these questions
            pass
    return QUESTIONS[question](store, about)


def _held(store: Store, _: object) -> object:
    # whole shares by snapshot and rank: a part and all its data files
    parts: dict[CheckpointId, dict[int, SnapshotPart]] = defaultdict(dict)
    for key in [*store.list(ROOT)]:
        at, rank = checkpoint_of(key), rank_of(key)
        if at is None or rank is None or not is_part(key):
            continue
        part = _read(store, key)
        if part is not None and _has_files(store, part):
            parts[at][rank] = part
    # one line a snapshot: every part has the same state and grid
    held = []
    for of_ranks in parts.values():
        part = next(iter(of_ranks.values()))
        held.append(
            HeldShares(
                attempt=part.attempt,
                step=part.shard.step,
                world_size=part.world_size,
                grid=part.grid,
                state=part.shard.state,
                ranks=tuple(_ranges(sorted(of_ranks))),
            )
        )
    return _HELD.dump_python(tuple(held), mode="json")


def _boxes(store: Store, about: object) -> object:
    question = _QUESTION.validate_python(about)
    ranks: list[int] = []
    boxes: list[SavedBox] = []
    state: dict[str, int | float | str] = {}
    for rank in question.ranks:
        # a part that is gone or damaged is left out, and the asker turns to another copy
        name = part_file(attempt=question.attempt, rank=rank)
        part = _read(store, folder_of(question.step) + name)
        if part is None:
            continue
        ranks.append(rank)
        state = part.shard.state
        boxes += BoxTable.of(part.shard.boxes).meeting(question.blocks)
    return _FOUND.dump_python(
        FoundBoxes(ranks=tuple(ranks), boxes=tuple(boxes), state=state), mode="json"
    )


QUESTIONS: Mapping[str, Callable[[Store, Any], object]] = {"held": _held, "boxes": _boxes}
"""Functions that answer, by question; they take the server's objects and the question's JSON, and return JSON."""


def _read(store: Store, key: str) -> SnapshotPart | None:
    """Return a rank's part; None when it is missing or damaged."""
    try:
        return _parsed(store.get(key))
    except (KeyError, ValidationError, CheckpointError):
        return None


@lru_cache(maxsize=NUM_PARTS_KEPT)
def _parsed(text: bytes) -> SnapshotPart:
    return parse_part(text)


def _has_files(store: Store, part: SnapshotPart) -> bool:
    folder = folder_of(part.shard.step)
    files = BoxTable.of(part.shard.boxes).files
    try:
        return all(store.size(folder + file) for file in files)
    except KeyError:
        return False


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last of each run of consecutive ``numbers``, which are sorted."""
    for number, before, after in zip(
        numbers, (None, *numbers[:-1]), (*numbers[1:], None), strict=True
    ):
        # a gap before the number begins a range, one behind it ends the range
        if before is None or number - before > 1:
            first = number
        if after is None or after - number > 1:
            yield first, number
