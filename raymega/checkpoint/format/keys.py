"""Keys of a checkpoint's parts in a run's store, and the order of checkpoints by age.

    checkpoints/step-00000100/a0002-rank00003.safetensors      rank 3 of attempt 2
    checkpoints/step-00000100/a0002-rank00003-001.safetensors  its second file, when it has several
    checkpoints/step-00000100/manifest-a0002.json              the driver of attempt 2
    checkpoints/step-00000100/a0002-rank00003.json             rank 3's part of a snapshot; in memory

Every key contains the number of its attempt, so a new attempt never touches what an older one wrote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ROOT = "checkpoints/"
# Three alternatives after the step: a data file, a rank's part of a snapshot, or a manifest.
_KEY = re.compile(
    r"checkpoints/step-(?P<step>\d{8,})/"
    r"(?:a(?P<data>\d{4,})-rank\d{5,}(?:(?:-\d{3,})?\.safetensors|(?P<part>\.json))"
    r"|manifest-a(?P<manifest>\d{4,})\.json)"
)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class CheckpointId:
    """Identity of one checkpoint of a run. Later attempts are newer, whatever their step.

    An attempt starts from the newest checkpoint that can be read. What earlier attempts wrote beyond
    that step is an abandoned branch.
    """

    # The order of the fields is the order of comparison.
    attempt: int
    step: int


def folder_of(step: int) -> str:
    """Return the prefix of all keys of the checkpoints of ``step``."""
    return f"{ROOT}step-{step:08d}/"


def data_file(*, attempt: int, rank: int, number: int = 0) -> str:
    """Return the name of a rank's data file; ``number`` counts the files of that rank from 0."""
    more = f"-{number:03d}" if number else ""
    return f"{data_prefix(attempt=attempt, rank=rank)}{more}.safetensors"


def data_prefix(*, attempt: int, rank: int) -> str:
    """Return the prefix of the names of everything that a rank writes."""
    return f"a{attempt:04d}-rank{rank:05d}"


def part_file(*, attempt: int, rank: int) -> str:
    """Return the name of the object that lists what a rank wrote of a snapshot."""
    return f"{data_prefix(attempt=attempt, rank=rank)}.json"


def manifest_key(at: CheckpointId) -> str:
    """Return the key of a checkpoint's manifest."""
    return f"{folder_of(at.step)}manifest-a{at.attempt:04d}.json"


def checkpoint_of(key: str) -> CheckpointId | None:
    """Return the checkpoint that the object ``key`` belongs to; None when it belongs to none."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    return CheckpointId(attempt=int(match["data"] or match["manifest"]), step=int(match["step"]))


def is_manifest(key: str) -> bool:
    """Return whether ``key`` is the key of a manifest."""
    match = _KEY.fullmatch(key)
    return match is not None and match["manifest"] is not None


def is_part(key: str) -> bool:
    """Return whether ``key`` is the key of a rank's part of a snapshot."""
    match = _KEY.fullmatch(key)
    return match is not None and match["part"] is not None
