"""Catalogue of a run's checkpoints: their manifests are found without a listing of data files.

    checkpoints/committed/step-00000100-a0002.json      the manifest of attempt 2 in the folder of step 100

An entry is written after its manifest and removed before it. So a folder without an entry may still hold a
manifest: of a build without a catalogue, of a copy by hand, or of a driver that ended between the two writes.
Such folders are looked at one by one. A step that is saved again loses its older entries before the new
manifest is written, so that its folder is looked at too. An entry whose folder is gone counts for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from raymega.checkpoint.format.keys import (
    COMMITTED,
    ROOT,
    CheckpointId,
    checkpoint_of,
    entry_key,
    entry_prefix,
    folder_of,
    is_manifest,
    manifest_key,
    manifest_prefix,
    step_of_folder,
)
from raymega.storage.store import Store, folders_below

FEW_FOLDERS = 64
"""Most folders without an entry that are looked at one by one; more are found by one listing of all keys."""


def manifest_keys(store: Store) -> set[str]:
    """Return the keys of all manifests, also of those that do not count.

    Requests: two listings with a line a checkpoint, and one for each folder without an entry.
    """
    # Entries before folders: a checkpoint committed in between has a folder, and is looked at there.
    entries = {at for key in store.list(COMMITTED) if (at := checkpoint_of(key))}
    steps = saved_steps(store)
    found = {manifest_key(at) for at in entries if at.step in steps}
    return found | set(_without_entry(store, steps - {at.step for at in entries}))


def saved_steps(store: Store) -> set[int]:
    """Return the steps that have a folder, of a checkpoint or of a save under way."""
    names = folders_below(store, ROOT)
    return {step for name in names if (step := step_of_folder(name)) is not None}


def lacking_entries(store: Store, manifests: Iterable[str]) -> list[CheckpointId]:
    """Return the checkpoints of ``manifests`` that have no entry, in order of age."""
    entries = set(store.list(COMMITTED))
    ids = (checkpoint_of(key) for key in manifests)
    return sorted(at for at in ids if at and entry_key(at) not in entries)


def enter(store: Store, at: CheckpointId) -> None:
    """Write the entry of a checkpoint whose manifest is there; a second time changes nothing."""
    text = json.dumps({"manifest": manifest_key(at)})
    store.put(entry_key(at), [text.encode()], overwrite=True)


def take_out(store: Store, at: CheckpointId) -> list[CheckpointId]:
    """Remove the entries of the other checkpoints of the step of ``at``, and return those checkpoints.

    Until the next entry of that step is written, its folder is looked at, whatever is in it.
    """
    keys = (key for key in store.list(entry_prefix(at.step)) if key != entry_key(at))
    entries = {other: key for key in keys if (other := checkpoint_of(key))}
    for key in entries.values():
        store.delete(key)
    return list(entries)


def _without_entry(store: Store, steps: set[int]) -> Iterator[str]:
    """Yield the manifests in the folders of ``steps``."""
    if len(steps) > FEW_FOLDERS:
        # many folders: one listing of all keys
        for key in filter(is_manifest, store.list(ROOT)):
            at = checkpoint_of(key)
            if at and at.step in steps:
                yield key
        return
    # few folders: a listing each
    for step in sorted(steps):
        yield from filter(is_manifest, store.list(folder_of(step) + manifest_prefix()))
