"""Files that come with raymega beside its code: job files, dashboards, cluster files."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

FOLDER = "share/raymega"
"""Where a wheel puts them, below the environment's root."""


def shipped_file(name: str) -> Path | None:
    """Find a file that raymega ships.

    Args:
        name: As in the repository, such as ``jobs/verify.yaml``.

    Returns:
        Its path in the repository or in the environment; None when there is no such file.
    """
    in_repository = Path(__file__).resolve().parents[2] / name
    if in_repository.is_file():
        return in_repository
    for entry in metadata.files("raymega") or ():
        if entry.as_posix().endswith(f"{FOLDER}/{name}"):
            return Path(str(entry.locate())).resolve()
    return None
