"""Empty sqlite database of MLflow, kept on this machine so that the next run copies it.

MLflow makes a new database by some fifty migrations, which take two seconds of CPU time; a copy takes a
hundredth of that. There is one file for each version of MLflow. Without it, or where it cannot be written, MLflow makes
the database itself.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

SCHEME = "sqlite:///"


def prepare_database(uri: str, make: Callable[[], object], *, kept: Path) -> None:
    """Give a sqlite ``uri`` without a file a copy of ``kept``; make both where ``kept`` does not exist.

    Args:
        uri: Tracking URI; one that is no sqlite file is left alone.
        make: Call that lets MLflow open the database at ``uri``, which creates its tables.
        kept: Empty database of this version of MLflow.
    """
    path = Path(uri.removeprefix(SCHEME))
    if not uri.startswith(SCHEME) or path.exists():
        return
    if kept.is_file():
        with suppress(OSError):
            _replace(path, lambda beside: shutil.copyfile(kept, beside))
        return
    make()
    with suppress(OSError, sqlite3.Error):  # a home that cannot be written
        kept.parent.mkdir(parents=True, exist_ok=True)
        _replace(kept, lambda beside: _copy_empty(path, beside))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside ``path`` and rename it, so that no other process sees half of it."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _copy_empty(path: Path, copy: Path) -> None:
    """Copy a database that has no runs yet, without its experiments: their artefacts lie beside the original."""
    with closing(sqlite3.connect(path)) as original, closing(sqlite3.connect(copy)) as other:
        original.backup(other)
        other.execute("DELETE FROM experiments")
        other.commit()


def artefact_location(uri: str) -> str | None:
    """Return a folder beside the sqlite file; None for a server, which has its own location."""
    if not uri.startswith("sqlite:///"):
        return None
    folder = Path(uri.removeprefix("sqlite:///")).resolve().parent
    return (folder / "mlflow-artefacts").as_uri()
