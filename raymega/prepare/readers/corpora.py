"""Knows the folders of `raymega data curate` among files to read: what lies in them beside the corpus.

It owns how an unfinished corpus is told from a whole one, which no reader may take it for.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from pyarrow import fs

STATE, STAGES = "_state", "stages"
# Recipe of a corpus that was begun, which a dataset in the making does not have, and the record of its end.
BEGUN, FINISHED = "curation.json", "curated.json"
# Folders that raymega writes beside what is to be read.
OWN_FOLDERS = (STATE, "_report")
_MARKER = f"{STATE}/{BEGUN}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFolders:
    """Folders of raymega below an input, as beginnings of names."""

    _unfinished: tuple[str, ...]
    _own: tuple[str, ...]

    def has(self, name: str) -> bool:
        """Return True if the file is raymega's own, and none to read."""
        return name.startswith(self._own)

    def is_unfinished(self, name: str) -> bool:
        """Return True if the file lies in a corpus that is not whole."""
        return name.startswith(self._unfinished)


def own_folders(names: Iterable[str]) -> OwnFolders:
    """Return raymega's folders among the names of an input's files."""
    every = set(names)
    tops = [name.removesuffix(_MARKER) for name in every if f"/{name}".endswith(f"/{_MARKER}")]
    # An object that a killed curation was writing stays in .partial.
    own = [f"{top}{folder}/" for top in tops for folder in (*OWN_FOLDERS, ".partial")]
    # Stages go after the record of the end has come.
    begun = {
        top for top in tops if any(each.startswith(f"{top}{STATE}/{STAGES}/") for each in every)
    }
    return OwnFolders(
        _unfinished=tuple(top for top in begun if f"{top}{STATE}/{FINISHED}" not in every),
        _own=(*(f"{folder}/" for folder in OWN_FOLDERS), *sorted(own)),
    )


def is_part_of_unfinished(system: fs.FileSystem, path: str) -> bool:
    """Return True if a file that is itself an input lies in a corpus that is not whole."""
    folder, _, name = path.rpartition("/")
    if not (name.startswith("part-") and name.endswith(".parquet")):
        return False
    # Who may not look there may still read the file.
    with suppress(OSError):
        places = [f"{folder}/{STATE}/{STAGES}", f"{folder}/{STATE}/{FINISHED}"]
        stages, end = system.get_file_info(places)
        return stages.type != fs.FileType.NotFound and end.type == fs.FileType.NotFound
    return False
