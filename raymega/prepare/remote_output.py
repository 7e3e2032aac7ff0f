"""Writes the output of a preparation to an object store, in the same steps as to a folder.

Tasks write to a temporary folder of their own node and upload. What groups have finished is kept
below ``_state/``; dataset.json is uploaded last. Output to a folder is in `raymega.prepare.output`.
"""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from raymega.data.format import META_FILE, SPLITS, TOKENIZER_FILE, DatasetMeta, encode_meta
from raymega.data.streaming.remote_dataset import meta_at, missing_shards
from raymega.errors import ConfigError, DataError, raise_faults
from raymega.prepare.output import occupied, other_recipe
from raymega.prepare.readers.pieces import ShardGroup
from raymega.prepare.records import (
    DISPROVED_FILE,
    RECIPE_FILE,
    STATE_FOLDER,
    decode_record,
    encode_record,
    record_name,
)
from raymega.prepare.shards import ORIGINS_SUFFIX, GroupDone
from raymega.storage.registry import open_store, store_faults
from raymega.storage.store import Store

# Longest piece of a group's file in memory while it is copied to a node.
PIECE_BYTES = 16 << 20
KEYS_IN_FLIGHT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOutput:
    """An unfinished dataset below ``uri``; this object is sent to the tasks."""

    uri: str

    def find_finished(self, recipe: dict[str, str]) -> DatasetMeta | None:
        """Return the finished dataset if it has this recipe; None if there is none.

        Raises:
            ConfigError: There is a dataset of another recipe, or the store cannot be used.
            DataError: A shard is missing in the store.
        """
        # dataset.json is uploaded last, so its presence means a finished dataset.
        raise_faults(ConfigError, store_faults(self.uri, field="--out"))
        if META_FILE not in _store(self.uri).list(META_FILE):
            return None
        meta = meta_at(self.uri)
        if meta.recipe != recipe:
            raise ConfigError(other_recipe(self.uri, meta.recipe, recipe))
        raise_faults(DataError, missing_shards(self.uri, meta))
        return meta

    def claim(self, recipe: dict[str, str]) -> None:
        """Reserve the location: write ``_state``, or continue with what is in it.

        Raises:
            ConfigError: The location has other content.
        """
        keys = list(_store(self.uri).list(""))
        marker = f"{STATE_FOLDER}/{RECIPE_FILE}"
        if keys and marker not in keys:
            raise ConfigError(occupied(self.uri))
        self.put_state(RECIPE_FILE, json.dumps(recipe, indent=1).encode())
        # Shards of a preparation that ended while it joined them.
        store = _store(self.uri)
        for key in keys:
            if key.startswith(tuple(f"{split}/" for split in SPLITS)):
                store.delete(key)

    def put_state(self, name: str, content: bytes) -> None:
        """Write a small file that tasks read."""
        self.put(f"{STATE_FOLDER}/{name}", [content])

    def get_state(self, name: str) -> bytes:
        """Return what :meth:`put_state` has written under ``name``."""
        return _store(self.uri).get(f"{STATE_FOLDER}/{name}")

    def has_state(self, name: str) -> bool:
        """Return True if :meth:`put_state` has written ``name``."""
        key = f"{STATE_FOLDER}/{name}"
        return key in _store(self.uri).list(key)

    def put(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write one of the dataset's files that are no shards."""
        _store(self.uri).put(name, pieces, overwrite=True)

    def find_done(self, groups: Sequence[ShardGroup]) -> Iterator[GroupDone]:
        """Yield the reports of the groups that are finished, then remove files of all others."""
        store = _store(self.uri)
        wanted = {group.key: group.index for group in groups}
        prefix = f"{STATE_FOLDER}/"
        names = {key.removeprefix(prefix) for key in store.list(prefix)}
        kept = {RECIPE_FILE, TOKENIZER_FILE, DISPROVED_FILE}
        records = sorted(record_name(key) for key in wanted)
        records = [name for name in records if name in names]
        # Many at a time, as there may be one for each 64 MiB of a corpus.
        for name, content in zip(
            records, _at_once(lambda name: store.get(prefix + name), records), strict=True
        ):
            done = decode_record(content, index=wanted[Path(name).stem])
            files = _files(done) if done else set()
            # An object is whole if it is there.
            if done is not None and files <= names:
                kept |= files | {name}
                yield done
        _delete(store, [prefix + name for name in sorted(names - kept)])

    @contextmanager
    def task_folder(self) -> Iterator[Path]:
        """Yield a temporary folder with the tokenizer; files in it are uploaded when the block ends."""
        store = _store(self.uri)
        with tempfile.TemporaryDirectory(prefix="raymega-prepare-") as name:
            folder = Path(name)
            (folder / TOKENIZER_FILE).write_bytes(store.get(f"{STATE_FOLDER}/{TOKENIZER_FILE}"))
            yield folder
            _upload(store, folder, prefix=f"{STATE_FOLDER}/")

    def put_record(self, key: str, done: GroupDone) -> None:
        """Note that a group is finished; all its other files must be uploaded."""
        self.put_state(record_name(key), encode_record(done))

    @contextmanager
    def shard_folders(self, files: Sequence[str]) -> Iterator[tuple[Path, Path]]:
        """Yield a folder with copies of groups' files, and one whose files are uploaded at the end."""
        store = _store(self.uri)
        with tempfile.TemporaryDirectory(prefix="raymega-prepare-") as name:
            state, folder = Path(name, "state"), Path(name, "final")
            for file in files:
                _download(store, f"{STATE_FOLDER}/{file}", state / file)
            folder.mkdir()
            yield state, folder
            _upload(store, folder, prefix="")

    def commit(self, meta: DatasetMeta) -> None:
        """Make the dataset readable by uploading dataset.json, then remove ``_state``."""
        self.put(META_FILE, [encode_meta(meta)])
        self.clean()

    def clean(self) -> None:
        """Remove ``_state``, which a finished dataset does not need."""
        store = _store(self.uri)
        # The claim goes last: it says whose the others are.
        keys = sorted(store.list(f"{STATE_FOLDER}/"), key=lambda key: key.endswith(RECIPE_FILE))
        _delete(store, keys[:-1])
        _delete(store, keys[-1:])


def _at_once(function: Callable[[str], Any], keys: Sequence[str]) -> Iterator[Any]:
    """Yield the results of ``function`` in the order of ``keys``; some keys are under way at a time."""
    with ThreadPoolExecutor(KEYS_IN_FLIGHT, thread_name_prefix="prepare") as pool:
        for start in range(0, len(keys), 4 * KEYS_IN_FLIGHT):
            yield from pool.map(function, keys[start : start + 4 * KEYS_IN_FLIGHT])


def _delete(store: Store, keys: Sequence[str]) -> None:
    for _ in _at_once(store.delete, keys):
        pass


@cache
def _store(uri: str) -> Store:
    # Once a process: a client takes 0.1 CPU seconds to make, and may be shared by threads.
    return open_store(uri)


def _files(done: GroupDone) -> set[str]:
    shards = {part.shard.file for part in done.parts.values()}
    return shards | {str(Path(file).with_suffix(ORIGINS_SUFFIX)) for file in shards}


def _upload(store: Store, folder: Path, *, prefix: str) -> None:
    """Upload the files in the folders of splits, mapped so that it needs no copy in memory."""
    for path in sorted(path for path in folder.glob("*/*") if path.is_file()):
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            key = f"{prefix}{path.relative_to(folder).as_posix()}"
            store.put(key, [memoryview(content)], overwrite=True)


def _download(store: Store, key: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        start = 0
        while block := store.get(key, start=start, num_bytes=PIECE_BYTES):
            file.write(block)
            start += len(block)
