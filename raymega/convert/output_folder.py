"""The output folder of an export: it appears whole or not at all, and overwrites nothing."""

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
    """Return the folder that ``--out`` names.

    Raises:
        ConfigError: ``out`` is the URI of an object store.
    """
    raise_faults(ConfigError, uri_faults(out, field="--out"))
    folder = local_path(out)
    assert folder is not None, "only folders are without faults"
    return folder


def folder_faults(folder: Path) -> Iterator[Fault]:
    """Return the fault of a ``folder`` that exists and is not empty."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    yield Fault(
        fact=f"--out {str(folder)!r} exists and is not an empty folder",
        rule="an export overwrites nothing",
        remedy="give a new folder",
    )


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into, renamed to ``folder`` when the block ends without an error.

    Raises:
        ConfigError: No folder can be made there.
    """
    # A link stays: a folder cannot take its name.
    folder = folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # In the same parent, so that the rename stays inside one file system and is atomic.
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-partial-"))
    except OSError as error:
        raise ConfigError(
            fact=f"--out {str(folder)!r} cannot be written: {error.strerror or error}",
            rule="an export is a new folder in one that can be written",
            remedy="give another folder, or correct the permissions",
        ) from error
    try:
        yield partial
        # mkdtemp makes folders that only their owner may enter.
        partial.chmod(0o755)
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
