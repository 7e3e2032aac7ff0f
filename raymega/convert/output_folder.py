"""A folder that an export writes: it appears whole or not at all, and none is overwritten."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raymega.errors import ConfigError, Fault, raise_faults
from raymega.storage.registry import folder_faults as uri_faults
from raymega.storage.registry import local_path


def folder_at(out: str) -> Path:
    """The folder that ``--out`` names, which no object store can be.

    Raises:
        ConfigError: It is a URI of something else.
    """
    raise_faults(ConfigError, uri_faults(out, field="--out"))
    folder = local_path(out)
    assert folder is not None, "only folders are without faults"
    return folder


def folder_faults(folder: Path) -> list[Fault]:
    """What keeps ``folder`` from being made."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return []
    return [
        Fault(
            fact=f"--out {str(folder)!r} exists and is not an empty folder",
            rule="an export overwrites nothing",
            remedy="give a new folder",
        )
    ]


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``folder`` when the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-partial-"))
    try:
        yield partial
        partial.chmod(0o755)
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
