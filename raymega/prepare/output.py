"""Claims the output folder and commits the dataset, so that no unfinished one is ever read.

It owns the order of writes: the claim first, then the shards, dataset.json last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raymega.data.format import (
    META_FILE,
    SPLITS,
    DatasetMeta,
    encode_meta,
    read_meta,
    size_faults,
)
from raymega.errors import ConfigError, DataError, Fault, raise_faults

CLAIM_FILE = "preparing.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderOutput:
    """An unfinished dataset in ``folder``, which all nodes share; this object is sent to the tasks."""

    folder: Path

    @property
    def uri(self) -> str:
        """Path of the folder."""
        return str(self.folder)

    def find_finished(self, recipe: dict[str, str]) -> DatasetMeta | None:
        """Return the finished dataset of this recipe; see :func:`find_finished`."""
        return find_finished(self.folder, recipe)

    def claim(self, recipe: dict[str, str]) -> None:
        """Reserve the folder for this recipe; see :func:`claim`."""
        claim(self.folder, recipe)

    def put(self, name: str, content: bytes) -> None:
        """Write one of the dataset's small files."""
        write_whole(self.folder / name, content)

    @contextmanager
    def task_folder(self) -> Iterator[Path]:
        """Yield the folder in which a task finds the tokenizer and writes its shards."""
        yield self.folder

    def commit(self, meta: DatasetMeta) -> None:
        """Make the dataset readable; see :func:`commit`."""
        commit(self.folder, meta)


def find_finished(folder: Path, recipe: dict[str, str]) -> DatasetMeta | None:
    """Return the finished dataset in ``folder`` if it has this recipe; None if there is none.

    Raises:
        ConfigError: The folder holds a dataset of another recipe.
        DataError: A shard is missing or has a wrong size.
    """
    if not (folder / META_FILE).is_file():
        return None
    meta = read_meta(folder)
    if meta.recipe != recipe:
        raise ConfigError(other_recipe(str(folder), meta.recipe, recipe))
    raise_faults(DataError, size_faults(folder, meta))
    return meta


def claim(folder: Path, recipe: dict[str, str]) -> None:
    """Reserve ``folder`` for this preparation by a claim file.

    The folder must be new, empty, or that of an unfinished preparation, whose shards are removed.

    Raises:
        ConfigError: The folder has other content.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The claim marks the folder as ours before anything in it is removed.
    if any(folder.iterdir()) and not (folder / CLAIM_FILE).is_file():
        raise ConfigError(occupied(str(folder)))
    write_whole(folder / CLAIM_FILE, json.dumps(recipe, indent=1).encode())
    for split in SPLITS:
        shutil.rmtree(folder / split, ignore_errors=True)


def commit(folder: Path, meta: DatasetMeta) -> None:
    """Make the dataset readable by writing dataset.json, then remove the claim."""
    write_whole(folder / META_FILE, encode_meta(meta))
    (folder / CLAIM_FILE).unlink()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that gets its final name only when complete."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)


def other_recipe(out: str, there: dict[str, str], here: dict[str, str]) -> Fault:
    """Return the fault of an output that holds a dataset of another recipe."""
    # Name only the parts of the recipe that differ.
    keys = [key for key in here | there if here.get(key) != there.get(key)]
    changes = ", ".join(f"{key} {there.get(key)} there, {here.get(key)} here" for key in keys)
    return Fault(
        fact=f"--out {out} holds a dataset of another recipe ({changes})",
        rule="a finished dataset is never overwritten",
        remedy="give another --out, or remove that folder",
    )


def occupied(out: str) -> Fault:
    """Return the fault of an output with other content than a dataset."""
    return Fault(
        fact=f"--out {out} is not empty and is no dataset",
        rule="shards are written to a folder of their own",
        remedy="give a new or empty folder",
    )
