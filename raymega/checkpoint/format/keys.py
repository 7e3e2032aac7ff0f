"""Where the parts of a checkpoint lie in a run's store, and which of two checkpoints is newer.

    checkpoints/step-00000100/a0002-rank00003.safetensors      rank 3 of attempt 2
    checkpoints/step-00000100/a0002-rank00003-001.safetensors  its second file, when it has several
    checkpoints/step-00000100/manifest-a0002.json              the driver of attempt 2
    checkpoints/step-00000100/a0002-rank00003.json             rank 3's part of a snapshot; in memory

Every key carries its attempt, so a new attempt never touches what an older one wrote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ROOT = "checkpoints/"
_KEY = re.compile(
    r"checkpoints/step-(?P<step>\d{8,})/"
    r"(?:a(?P<data>\d{4,})-rank\d{5,}(?:(?:-\d{3,})?\.safetensors|(?P<part>\.json))"
    r"|manifest-a(?P<manifest>\d{4,})\.json)"
)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class CheckpointId:
    """One checkpoint of a run. Later attempts are newer, whatever their step.

    An attempt starts from the newest checkpoint that can be read, so what earlier attempts wrote
    beyond that step is a branch that was given up.
    """

    attempt: int
    step: int


def folder_of(step: int) -> str:
    """Prefix of all keys of the checkpoints of ``step``."""
    return f"{ROOT}step-{step:08d}/"


def data_file(*, attempt: int, rank: int, number: int = 0) -> str:
    """Name of a rank's data file in that folder; ``number`` tells several of one rank apart."""
    more = f"-{number:03d}" if number else ""
    return f"{data_prefix(attempt=attempt, rank=rank)}{more}.safetensors"


def data_prefix(*, attempt: int, rank: int) -> str:
    """How the names of all that a rank writes begin."""
    return f"a{attempt:04d}-rank{rank:05d}"


def part_file(*, attempt: int, rank: int) -> str:
    """Name of the object that says what a rank wrote of a snapshot."""
    return f"{data_prefix(attempt=attempt, rank=rank)}.json"


def manifest_key(at: CheckpointId) -> str:
    """Key of a checkpoint's manifest."""
    return f"{folder_of(at.step)}manifest-a{at.attempt:04d}.json"


def checkpoint_of(key: str) -> CheckpointId | None:
    """The checkpoint that ``key`` is a part of, or None when it is part of none."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    return CheckpointId(attempt=int(match["data"] or match["manifest"]), step=int(match["step"]))


def is_manifest(key: str) -> bool:
    """Whether ``key`` is a manifest's."""
    match = _KEY.fullmatch(key)
    return match is not None and match["manifest"] is not None


def is_part(key: str) -> bool:
    """Whether ``key`` is that of a rank's part of a snapshot."""
    match = _KEY.fullmatch(key)
    return match is not None and match["part"] is not None
