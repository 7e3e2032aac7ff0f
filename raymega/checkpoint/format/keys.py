"""Keys of a checkpoint's parts in a run's store, and the order of checkpoints by age.

    checkpoints/step-00000100/a0002-rank00003.safetensors      rank 3 of attempt 2
    checkpoints/step-00000100/a0002-rank00003-001.safetensors  its second file, when it has several
    checkpoints/step-00000100/index-a0002-00000.parquet        boxes that its manifest has no room for
    checkpoints/step-00000100/manifest-a0002.json              the driver of attempt 2
    checkpoints/step-00000100/a0002-rank00003.json             rank 3's part of a snapshot; in memory
    checkpoints/committed/step-00000100-a0002.json             entry of a manifest in the catalogue

Every key contains the number of its attempt, so a new attempt never touches what an older one wrote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ROOT = "checkpoints/"
COMMITTED = f"{ROOT}committed/"
_FOLDER = re.compile(r"step-(?P<step>\d{8,})")
_ENTRY = re.compile(r"checkpoints/committed/step-(?P<step>\d{8,})-a(?P<attempt>\d{4,})\.json")
# After the step: a data file or a rank's part of a snapshot, a part of the index, or a manifest.
_KEY = re.compile(
    r"checkpoints/step-(?P<step>\d{8,})/"
    r"(?:a(?P<data>\d{4,})-rank(?P<rank>\d{5,})(?:(?:-\d{3,})?\.safetensors|(?P<part>\.json))"
    r"|index-a(?P<index>\d{4,})-\d{5,}\.parquet"
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
    return f"{folder_of(at.step)}{manifest_prefix()}a{at.attempt:04d}.json"


def manifest_prefix() -> str:
    """Return the begin of the names of manifests in the folder of their step."""
    return "manifest-"


def entry_key(at: CheckpointId) -> str:
    """Return the key of a checkpoint's entry in the catalogue."""
    return f"{entry_prefix(at.step)}a{at.attempt:04d}.json"


def entry_prefix(step: int) -> str:
    """Return the begin of the keys of all entries of ``step`` in the catalogue."""
    return f"{COMMITTED}step-{step:08d}-"


def is_entry(key: str) -> bool:
    """Return whether ``key`` is the key of an entry in the catalogue."""
    return _ENTRY.fullmatch(key) is not None


def step_of_folder(name: str) -> int | None:
    """Return the step of a folder's name, such as ``step-00000100``; None for another name."""
    match = _FOLDER.fullmatch(name)
    return int(match["step"]) if match else None


def index_prefix(at: CheckpointId) -> str:
    """Return the begin of the names of a checkpoint's parts of the index."""
    return f"index-a{at.attempt:04d}"


def checkpoint_of(key: str) -> CheckpointId | None:
    """Return the checkpoint that the object ``key`` belongs to; None when it belongs to none."""
    if entry := _ENTRY.fullmatch(key):
        return CheckpointId(attempt=int(entry["attempt"]), step=int(entry["step"]))
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    return CheckpointId(
        attempt=int(match["data"] or match["index"] or match["manifest"]), step=int(match["step"])
    )


def rank_of(key: str) -> int | None:
    """Return the rank that wrote the data file or part ``key``; None for another key."""
    match = _KEY.fullmatch(key)
    return int(match["rank"]) if match and match["rank"] else None


def is_manifest(key: str) -> bool:
    """Return whether ``key`` is the key of a manifest."""
    match = _KEY.fullmatch(key)
    return match is not None and match["manifest"] is not None


def is_part(key: str) -> bool:
    """Return whether ``key`` is the key of a rank's part of a snapshot."""
    match = _KEY.fullmatch(key)
    return match is not None and match["part"] is not None
