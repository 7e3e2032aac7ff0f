"""Which objects of a run's checkpoints may go. The rule is a pure function; prune carries it out."""

from __future__ import annotations

from collections.abc import Iterable

from raymega.checkpoint.keys import ROOT, CheckpointId, checkpoint_of, is_manifest
from raymega.checkpoint.manifest import (
    UnknownVersionError,
    broken_files,
    list_manifests,
    read_manifest,
)
from raymega.errors import CheckpointError
from raymega.storage.store import Store


def expired_keys(
    keys: Iterable[str], whole: Iterable[CheckpointId], *, keep_last: int
) -> tuple[str, ...]:
    """Keys to delete, manifests first, so that no reader meets a manifest without its files.

    Kept are the ``keep_last`` newest whole checkpoints and everything newer than the newest of
    them, which may be a save under way. The rest of what checkpoints wrote is either too old or
    was never finished. Foreign keys are not touched.

    Args:
        keys: Every key below ``checkpoints/``.
        whole: The checkpoints that could be restored.
        keep_last: At least 1.
    """
    newest_first = sorted(whole, reverse=True)
    if not newest_first:
        return ()
    kept, newest = set(newest_first[:keep_last]), newest_first[0]
    owners = {key: checkpoint_of(key) for key in keys}
    expired = [key for key, at in owners.items() if at and at < newest and at not in kept]
    return tuple(sorted(expired, key=lambda key: (not is_manifest(key), key)))


def prune(store: Store, *, keep_last: int) -> tuple[str, ...]:
    """Delete what :func:`expired_keys` says and return it.

    Raises:
        StorageError: The store cannot be read, in which case nothing is deleted, or failed later.
    """
    manifests = list_manifests(store)
    whole = [checkpoint_of(key) for key in manifests if _is_whole(store, key)]
    keys = expired_keys(store.list(ROOT), filter(None, whole), keep_last=keep_last)
    for key in keys:
        store.delete(key)
    return keys


def _is_whole(store: Store, key: str) -> bool:
    try:
        return not broken_files(store, read_manifest(store, key))
    except UnknownVersionError:
        return True  # not this build's to judge
    except CheckpointError:
        return False
