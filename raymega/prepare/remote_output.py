"""Writes the output of a preparation to an object store, in the same steps as to a folder.

Tasks write their shards to a temporary folder of their own node and upload them; dataset.json is
uploaded last. Output to a folder is in `raymega.prepare.output`.
"""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raymega.data.format import META_FILE, SPLITS, TOKENIZER_FILE, DatasetMeta, encode_meta
from raymega.data.remote_dataset import meta_at, missing_shards
from raymega.errors import ConfigError, DataError, raise_faults
from raymega.prepare.output import CLAIM_FILE, occupied, other_recipe
from raymega.storage.registry import open_store, store_faults


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
        if META_FILE not in open_store(self.uri).list(META_FILE):
            return None
        meta = meta_at(self.uri)
        if meta.recipe != recipe:
            raise ConfigError(other_recipe(self.uri, meta.recipe, recipe))
        raise_faults(DataError, missing_shards(self.uri, meta))
        return meta

    def claim(self, recipe: dict[str, str]) -> None:
        """Reserve the location by a claim file; shards of an unfinished preparation are removed.

        Raises:
            ConfigError: The location has other content.
        """
        store = open_store(self.uri)
        keys = list(store.list(""))
        # The claim marks the location as ours before anything in it is removed.
        if keys and CLAIM_FILE not in keys:
            raise ConfigError(occupied(self.uri))
        self.put(CLAIM_FILE, json.dumps(recipe, indent=1).encode())
        for key in keys:
            if key.startswith(tuple(f"{split}/" for split in SPLITS)):
                store.delete(key)

    def put(self, name: str, content: bytes) -> None:
        """Write one of the dataset's small files."""
        open_store(self.uri).put(name, [content], overwrite=True)

    @contextmanager
    def task_folder(self) -> Iterator[Path]:
        """Yield a temporary folder with the tokenizer; shards in it are uploaded when the block ends."""
        store = open_store(self.uri)
        with tempfile.TemporaryDirectory(prefix="raymega-prepare-") as name:
            folder = Path(name)
            (folder / TOKENIZER_FILE).write_bytes(store.get(TOKENIZER_FILE))
            yield folder
            # The task's shards, mapped so that an upload needs no copy in memory.
            for path in sorted(folder.glob("*/*.arrow")):
                with path.open("rb") as file:
                    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    key = path.relative_to(folder).as_posix()
                    store.put(key, [memoryview(content)], overwrite=True)

    def commit(self, meta: DatasetMeta) -> None:
        """Make the dataset readable by uploading dataset.json, then remove the claim."""
        self.put(META_FILE, encode_meta(meta))
        open_store(self.uri).delete(CLAIM_FILE)
