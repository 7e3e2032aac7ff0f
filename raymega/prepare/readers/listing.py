"""Lists the files below an input, and knows the folders of Hugging Face `datasets`.

It owns what a folder holds, with links and unreadable entries; patterns are applied by
`raymega.prepare.sources`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pyarrow import fs

# What `Dataset.save_to_disk` writes beside its Arrow files; state.json lists them. The last lies beside folders of splits.
HF_STATE, HF_INFO, HF_DICT = "state.json", "dataset_info.json", "dataset_dict.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """Entry of a folder; ``why`` says what makes it unreadable, or is empty."""

    name: str
    path: str
    num_bytes: int = 0
    modified_ns: int = 0
    why: str = ""


def root_of(name: str) -> str:
    """Return the URI of an input that is given as a path or a URI."""
    return name if "://" in name else Path(name).expanduser().absolute().as_uri()


def list_root(system: fs.FileSystem, top: str) -> list[Listed]:
    """Return the files below a folder, and what is there instead of files, ordered by name.

    Raises:
        OSError: The folder does not exist or cannot be listed.
    """
    found = _walk(top) if isinstance(system, fs.LocalFileSystem) else _select(system, top)
    return _without_hf_files(system, sorted(found, key=lambda each: each.name))


def _select(system: fs.FileSystem, top: str) -> Iterator[Listed]:
    for info in system.get_file_info(fs.FileSelector(top, recursive=True)):
        if info.is_file:
            name = info.path.removeprefix(top).lstrip("/")
            yield Listed(
                name=name, path=info.path, num_bytes=info.size, modified_ns=info.mtime_ns or 0
            )


def _walk(top: str) -> Iterator[Listed]:
    """Yield the entries of a local folder. Links to files are followed, links to folders are not.

    A link to a folder would be read twice, or for ever, if it leads to where the walk has been.
    """

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(top, onerror=refuse):
        for name in (*folders, *files):
            path = Path(folder, name)
            listed = Listed(name=path.relative_to(top).as_posix(), path=str(path))
            if name in folders:
                if path.is_symlink():
                    yield _broken(listed, f"is a link to the folder {path.readlink()}")
                continue
            yield _file(listed, path)


def _file(listed: Listed, path: Path) -> Listed:
    try:
        # Arrow takes no other names.
        listed.path.encode()
    except UnicodeEncodeError:
        shown = ascii(listed.name)[1:-1]
        return _broken(Listed(name=shown, path=shown), "has a name that is not UTF-8")
    try:
        status = path.stat()
    except OSError as error:
        return _broken(listed, f"cannot be read: {error.strerror}")
    if not stat.S_ISREG(status.st_mode):
        return _broken(listed, "is neither a file nor a folder")
    return Listed(
        name=listed.name,
        path=listed.path,
        num_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
    )


def _broken(listed: Listed, why: str) -> Listed:
    return Listed(name=listed.name, path=listed.path, why=why)


def _without_hf_files(system: fs.FileSystem, listed: list[Listed]) -> list[Listed]:
    """Leave out the descriptions in folders of `datasets`, and Arrow files that they do not list.

    The folder may hold ``cache-*.arrow`` files of past computations.
    """
    by_name = {each.name: each for each in listed}
    for name in [name for name in by_name if PurePosixPath(name).name == HF_STATE]:
        prefix = name.removesuffix(HF_STATE)
        with system.open_input_stream(by_name[name].path) as stream:
            wanted = _data_files(stream.read())
        if wanted is None or f"{prefix}{HF_INFO}" not in by_name:
            continue
        for other in [each for each in by_name if each.rpartition("/")[0] == prefix.rstrip("/")]:
            if other.removeprefix(prefix) not in wanted:
                del by_name[other]
        # A listed file that is not there is told, not passed over.
        for gone in (f"{prefix}{each}" for each in sorted(wanted)):
            missing = _broken(Listed(name=gone, path=gone), f"is missing; {name} lists it")
            by_name.setdefault(gone, missing)
    return [*by_name.values()]


def _data_files(content: bytes) -> set[str] | None:
    """Return the files that state.json of `datasets` lists; None if it is something else."""
    try:
        return {each["filename"] for each in json.loads(content)["_data_files"]}
    except (ValueError, KeyError, TypeError):
        return None
