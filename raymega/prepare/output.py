"""Claims the output folder and commits the dataset, so that no half-written one is ever read.

It owns the order of writes: the claim first, shards between, dataset.json last.
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
    """A dataset in the making in ``folder``, which all nodes see; travels to the tasks."""

    folder: Path

    @property
    def uri(self) -> str:
        """The folder."""
        return str(self.folder)

    def find_finished(self, recipe: dict[str, str]) -> DatasetMeta | None:
        """See the function of that name."""
        return find_finished(self.folder, recipe)

    def claim(self, recipe: dict[str, str]) -> None:
        """See the function of that name."""
        claim(self.folder, recipe)

    def put(self, name: str, content: bytes) -> None:
        """Write one of the dataset's small files."""
        write_whole(self.folder / name, content)

    @contextmanager
    def task_folder(self) -> Iterator[Path]:
        """Where a task writes its shards and finds the tokenizer."""
        yield self.folder

    def commit(self, meta: DatasetMeta) -> None:
        """See the function of that name."""
        commit(self.folder, meta)


def find_finished(folder: Path, recipe: dict[str, str]) -> DatasetMeta | None:
    """The dataset that ``folder`` holds when it is whole and of this recipe, None when none is.

    Raises:
        ConfigError: It holds a dataset of another recipe.
        DataError: Its shards are not all there.
    """
    if not (folder / META_FILE).is_file():
        return None
    meta = read_meta(folder)
    if meta.recipe != recipe:
        raise ConfigError(other_recipe(str(folder), meta.recipe, recipe))
    raise_faults(DataError, size_faults(folder, meta))
    return meta


def claim(folder: Path, recipe: dict[str, str]) -> None:
    """Make ``folder`` ours: empty but for the claim.

    Only a new or empty folder is taken, or one that a preparation left unfinished; of that, what
    the preparation wrote is removed.

    Raises:
        ConfigError: The folder holds something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / CLAIM_FILE).is_file():
        raise ConfigError(occupied(str(folder)))
    write_whole(folder / CLAIM_FILE, json.dumps(recipe, indent=1).encode())
    for split in SPLITS:
        shutil.rmtree(folder / split, ignore_errors=True)


def commit(folder: Path, meta: DatasetMeta) -> None:
    """Make the dataset readable and drop the claim."""
    write_whole(folder / META_FILE, encode_meta(meta))
    (folder / CLAIM_FILE).unlink()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that has its name only when it is whole."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)


def other_recipe(out: str, there: dict[str, str], here: dict[str, str]) -> Fault:
    """The fault of an output that is a dataset of something else."""
    keys = [key for key in here | there if here.get(key) != there.get(key)]
    changes = ", ".join(f"{key} {there.get(key)} there, {here.get(key)} here" for key in keys)
    return Fault(
        fact=f"--out {out} holds a dataset of another recipe ({changes})",
        rule="a finished dataset is never overwritten",
        remedy="give another --out, or remove that folder",
    )


def occupied(out: str) -> Fault:
    """The fault of an output where something else lies."""
    return Fault(
        fact=f"--out {out} is not empty and is no dataset",
        rule="shards are written to a folder of their own",
        remedy="give a new or empty folder",
    )
