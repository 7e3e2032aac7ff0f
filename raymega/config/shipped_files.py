"""Finds files that raymega ships beside its code: job files, dashboards, cluster files."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

FOLDER = "share/raymega"
"""Folder of these files in an installed wheel, below the environment's root."""


def shipped_file(name: str) -> Path | None:
    """Find a file that raymega ships.

    Args:
        name: Path of the file in the repository, such as ``jobs/verify.yaml``.

    Returns:
        Path of the file in the repository or in the environment; None when there is no such file.
    """
    # A checkout, or an editable install; else the record of the installed wheel.
    in_repository = Path(__file__).resolve().parents[2] / name
    if in_repository.is_file():
        return in_repository
    for entry in metadata.files("raymega") or ():
        if entry.as_posix().endswith(f"{FOLDER}/{name}"):
            return Path(str(entry.locate())).resolve()
    return None
