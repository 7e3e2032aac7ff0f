"""Options of a curation, and whether its output is free, unfinished or finished."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from raymega.curate.state import State
from raymega.data.format import local_folder
from raymega.data.streaming.remote_dataset import is_remote
from raymega.errors import ConfigError, Fault, raise_faults
from raymega.prepare.readers.corpora import BEGUN
from raymega.prepare.records import STATE_FOLDER
from raymega.storage.local import PARTIAL_FOLDER
from raymega.storage.registry import store_faults


@dataclass(frozen=True, kw_only=True, slots=True)
class CurateOptions:
    """Options of a curation.

    Attributes:
        inputs: Files, folders or URIs with text.
        out: Folder of the corpus, which all nodes must share; or a URI in an object store.
        recipe: Path of the recipe, or the name of a shipped one.
        include: Patterns of files to read; a file must match at least one.
        exclude: Patterns of files to leave out; a file must match none.
        text_key: Key of JSON objects or column of tables that holds the text.
        max_bad_lines: Number of lines, rows or text files without a document that are left out.
        address: Address of the Ray cluster; see `raymega.session.session_at`.
    """

    inputs: tuple[str, ...]
    out: str
    recipe: str
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    text_key: str = "text"
    max_bad_lines: int = 0
    address: str = "auto"

    @property
    def uri(self) -> str:
        """Location of the output, the same for every process."""
        return self.out if is_remote(self.out) else str(local_folder(self.out).absolute())


def option_faults(options: CurateOptions) -> Iterator[Fault]:
    """Yield the faults of options other than inputs and recipe."""
    if options.max_bad_lines < 0:
        yield Fault(
            fact=f"--max-bad-lines {options.max_bad_lines}",
            rule="it must be at least 0",
            remedy="use 0",
        )
    if not options.text_key:
        yield Fault(
            fact="--text-key is empty",
            rule="it must be a key of JSON objects or a column of tables",
            remedy="use text",
        )
    yield from store_faults(options.out, field="--out")


def find_finished(state: State, recipe: dict[str, str], name: str) -> dict[str, Any] | None:
    """Return the record of a finished corpus of this recipe; None if there is none.

    Raises:
        ConfigError: The output holds a corpus of another recipe, or a file of it is missing.
    """
    if "" not in state.names(name):
        return None
    found: dict[str, Any] = json.loads(state.get(name))
    there = found["recipe"]
    if there != recipe:
        changed = ", ".join(key for key in recipe | there if recipe.get(key) != there.get(key))
        raise ConfigError(
            fact=f"--out {state.uri} holds a corpus of another recipe (other {changed})",
            rule="a finished corpus is never overwritten",
            remedy="give another --out, or remove that folder",
        )
    missing = [file for file in found["files"] if file not in set(state.store.list(file))]
    raise_faults(ConfigError, [_missing(state.uri, file) for file in missing])
    return found


def claim(state: State, recipe: dict[str, str]) -> None:
    """Reserve the output, or continue with what is in it.

    Raises:
        ConfigError: The output has other content.
    """
    keys = [key for key in state.store.list("") if not key.startswith(".partial/")]
    is_ours = f"{STATE_FOLDER}/{BEGUN}" in keys
    if keys and not is_ours:
        raise ConfigError(
            fact=f"--out {state.uri} is not empty and is no corpus",
            rule="a corpus is written to a folder of its own",
            remedy="give a new or empty folder",
        )
    state.put(BEGUN, json.dumps(recipe, indent=1).encode())


def tidy(options: CurateOptions, state: State) -> None:
    """Remove what a finished corpus no longer needs."""
    for prefix in ("stages/", "assets/"):
        state.delete(prefix)
    if is_remote(options.out):
        return
    # The store of a folder leaves empty folders, and what a killed process was writing.
    rmtree(Path(options.uri, PARTIAL_FOLDER), ignore_errors=True)
    folders = [path for path in Path(options.uri).rglob("*") if path.is_dir()]
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):
            folder.rmdir()


def _missing(uri: str, file: str) -> Fault:
    return Fault(
        fact=f"{uri}/{file} is missing",
        rule="a finished corpus keeps its files",
        remedy="remove the folder and curate again",
    )
