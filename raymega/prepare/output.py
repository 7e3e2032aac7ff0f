"""Writes a preparation to a folder, so that no unfinished dataset is ever read and no work is lost.

Everything is written below ``_state/`` and moved from there at the end, dataset.json last. Output to
an object store is in `raymega.prepare.remote_output`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raymega.data.format import (
    META_FILE,
    DatasetMeta,
    encode_meta,
    read_meta,
    size_faults,
)
from raymega.errors import ConfigError, DataError, Fault, raise_faults
from raymega.prepare.readers.pieces import ShardGroup
from raymega.prepare.records import (
    RECIPE_FILE,
    RECORDS_FOLDER,
    STATE_FOLDER,
    decode_record,
    encode_record,
    record_name,
)
from raymega.prepare.shards import ORIGINS_SUFFIX, GroupDone
from raymega.prepare.whole_files import PARTIAL_SUFFIX, write_whole

# Below _state: the dataset's files before they are moved to their places.
FINAL_FOLDER = "final"


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderOutput:
    """An unfinished dataset in ``folder``, which all nodes share; this object is sent to the tasks."""

    folder: Path

    @property
    def uri(self) -> str:
        """Path of the folder."""
        return str(self.folder)

    @property
    def _state(self) -> Path:
        return self.folder / STATE_FOLDER

    def find_finished(self, recipe: dict[str, str]) -> DatasetMeta | None:
        """Return the finished dataset if it has this recipe; None if there is none.

        Raises:
            ConfigError: The folder holds a dataset of another recipe.
            DataError: A shard is missing or has a wrong size.
        """
        if not (self.folder / META_FILE).is_file():
            return None
        meta = read_meta(self.folder)
        if meta.recipe != recipe:
            raise ConfigError(other_recipe(str(self.folder), meta.recipe, recipe))
        raise_faults(DataError, size_faults(self.folder, meta))
        return meta

    def claim(self, recipe: dict[str, str]) -> None:
        """Reserve the folder: make ``_state``, or continue with what is in it.

        The folder must be new, empty, or that of an unfinished preparation.

        Raises:
            ConfigError: The folder has other content, or cannot be written.
        """
        marker = self._state / RECIPE_FILE
        # The marker says that the folder is ours, before anything in it is removed.
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (marker.is_file() or self._is_untouched()):
                raise ConfigError(occupied(str(self.folder)))
            self._state.mkdir(exist_ok=True)
            write_whole(marker, [json.dumps(recipe, indent=1).encode()])
        except OSError as error:
            raise ConfigError(unwritable(str(self.folder), error)) from error

    def _is_untouched(self) -> bool:
        # The marker itself may have been under way when a preparation was killed.
        if not set(self.folder.iterdir()) <= {self._state} or self._state.is_file():
            return False
        begun = [*self._state.iterdir()] if self._state.is_dir() else []
        marker = Path(RECIPE_FILE).stem
        return all(p.suffix == PARTIAL_SUFFIX and p.name.startswith(marker) for p in begun)

    def put_state(self, name: str, content: bytes) -> None:
        """Write a small file that tasks read."""
        write_whole(self._state / name, [content])

    def get_state(self, name: str) -> bytes:
        """Return what :meth:`put_state` has written under ``name``."""
        return (self._state / name).read_bytes()

    def has_state(self, name: str) -> bool:
        """Return True if :meth:`put_state` has written ``name``."""
        return (self._state / name).is_file()

    def put(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write one of the dataset's files that are no shards; it gets to its place at the commit."""
        write_whole(self._state / FINAL_FOLDER / name, pieces)

    def find_done(self, groups: Sequence[ShardGroup]) -> Iterator[GroupDone]:
        """Yield the reports of the groups that are finished, then remove files of all others."""
        shutil.rmtree(self._state / FINAL_FOLDER, ignore_errors=True)
        wanted = {group.key: group.index for group in groups}
        kept = set[str]()
        for path in sorted((self._state / RECORDS_FOLDER).glob("*.json")):
            done = None
            if path.stem in wanted:
                done = decode_record(path.read_bytes(), index=wanted[path.stem])
            if done is not None and self._is_whole(done):
                kept.add(path.stem)
                yield done
            else:
                path.unlink()
        for path in self._state.glob("*/*"):
            if path.parent.name != RECORDS_FOLDER and path.is_file() and path.stem not in kept:
                path.unlink()

    def _is_whole(self, done: GroupDone) -> bool:
        paths = {self._state / part.shard.file: part.shard for part in done.parts.values()}
        return all(
            path.is_file()
            and path.stat().st_size == shard.num_bytes
            and path.with_suffix(ORIGINS_SUFFIX).is_file()
            for path, shard in paths.items()
        )

    @contextmanager
    def task_folder(self) -> Iterator[Path]:
        """Yield the folder in which a task finds the tokenizer and writes the tokens of a group."""
        yield self._state

    def put_record(self, key: str, done: GroupDone) -> None:
        """Note that a group is finished; all its other files must be written."""
        write_whole(self._state / record_name(key), [encode_record(done)])

    @contextmanager
    def shard_folders(self, files: Sequence[str]) -> Iterator[tuple[Path, Path]]:  # noqa: ARG002
        """Yield the folder with the files of groups, and the one in which to write a shard."""
        yield self._state, self._state / FINAL_FOLDER

    def commit(self, meta: DatasetMeta) -> None:
        """Move the files to their places, dataset.json last, then remove ``_state``."""
        final = self._state / FINAL_FOLDER
        # Left by tasks that were killed and run again.
        for path in final.rglob(f"*{PARTIAL_SUFFIX}"):
            path.unlink()
        self.put(META_FILE, [encode_meta(meta)])
        for path in sorted(final.iterdir(), key=lambda path: path.name == META_FILE):
            # What a commit that was interrupted has moved already is replaced.
            place = self.folder / path.name
            if place.is_dir():
                shutil.rmtree(place)
            path.replace(place)
        self.clean()

    def clean(self) -> None:
        """Remove ``_state``, which a finished dataset does not need."""
        shutil.rmtree(self._state, ignore_errors=True)


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


def unwritable(out: str, error: OSError) -> Fault:
    """Return the fault of an output that cannot be written."""
    return Fault(
        fact=f"--out {out} cannot be written: {error.strerror or error}",
        rule="a dataset is a folder that every node can write to",
        remedy="give another --out, or correct the permissions",
    )
