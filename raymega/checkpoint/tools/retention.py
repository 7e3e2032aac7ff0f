"""Retention of a run's checkpoints: a pure function chooses what to delete, and Pruner deletes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite

from raymega.checkpoint.format.keys import ROOT, CheckpointId, checkpoint_of, is_manifest
from raymega.checkpoint.format.manifest import (
    UnknownVersionError,
    broken_files,
    list_manifests,
    read_manifest,
)
from raymega.errors import CheckpointError
from raymega.storage.store import Store

BEST_BY = "eval/loss"
"""Metric by which checkpoints are ranked, smallest first; in the manifest if the step was evaluated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPolicy:
    """Rules for the whole checkpoints to keep; a checkpoint stays when any of the three keeps it.

    Attributes:
        last: Number of newest checkpoints to keep; at least 1.
        every: Divisor of the steps whose checkpoints are kept; 0 turns the rule off.
        best: Number of checkpoints with the least BEST_BY to keep.
    """

    last: int
    every: int = 0
    best: int = 0


def kept(whole: Mapping[CheckpointId, float], keep: RetentionPolicy) -> set[CheckpointId]:
    """Return the checkpoints of ``whole`` that the rules keep.

    Args:
        whole: Whole checkpoints, each with its BEST_BY; inf without an evaluation.
        keep: Rules to apply.
    """
    found = set(sorted(whole, reverse=True)[: keep.last])
    # Of several checkpoints of one step only the newest counts; the others are abandoned branches.
    current = {at.step: at for at in sorted(whole)}.values()
    if keep.every:
        found |= {at for at in current if at.step % keep.every == 0}
    measured = [at for at in current if isfinite(whole[at])]
    # Ties go to the later attempt, then to the later step.
    best = sorted(measured, key=lambda at: (whole[at], -at.attempt, -at.step))
    return found | set(best[: keep.best])


def expired_keys(
    keys: Iterable[str], whole: Mapping[CheckpointId, float], keep: RetentionPolicy
) -> tuple[str, ...]:
    """Return the keys to delete, manifests first, so that no manifest outlives its files.

    Checkpoints of :func:`kept` stay, and so does everything newer than the newest of them, which may be
    a save under way. Other objects of checkpoints are too old, or belong to saves that never finished.
    Keys that no checkpoint uses are not touched.

    Args:
        keys: All keys below ``checkpoints/``.
        whole: Whole checkpoints, as for :func:`kept`.
        keep: Rules to apply.
    """
    # Without a whole checkpoint, what is there may be all that can be rescued.
    if not whole:
        return ()
    stay, newest = kept(whole, keep), max(whole)
    owners = {key: checkpoint_of(key) for key in keys}
    expired = [key for key, at in owners.items() if at and at < newest and at not in stay]
    return tuple(sorted(expired, key=lambda key: (not is_manifest(key), key)))


class Pruner:
    """Deletes the checkpoints of a run that a policy does not keep.

    A checkpoint that was found whole once is not examined again.
    """

    def __init__(self, store: Store, keep: RetentionPolicy) -> None:
        self._store, self._keep = store, keep
        self._whole: dict[CheckpointId, float] = {}

    def expired(self) -> tuple[str, ...]:
        """Return the keys that can be deleted now.

        Raises:
            StorageError: The store cannot be read.
        """
        # BEST_BY of every whole checkpoint, from memory where it is known.
        found: dict[CheckpointId, float] = {}
        for key in list_manifests(self._store):
            at = checkpoint_of(key)
            assert at is not None, f"{key} is a manifest's"
            value = self._whole[at] if at in self._whole else _value(self._store, key)
            if value is not None:
                found[at] = value
        self._whole = found
        return expired_keys(self._store.list(ROOT), found, self._keep)

    def prune(self) -> tuple[str, ...]:
        """Delete the keys of :meth:`expired` and return them.

        Raises:
            StorageError: The store cannot be read, and nothing was deleted; or a deletion failed.
        """
        keys = self.expired()
        for key in keys:
            self._store.delete(key)
        return keys


def _value(store: Store, key: str) -> float | None:
    """Return a checkpoint's BEST_BY, inf without an evaluation; None when it is not whole."""
    try:
        manifest = read_manifest(store, key)
        return None if broken_files(store, manifest) else manifest.metrics.get(BEST_BY, inf)
    except UnknownVersionError:
        return inf  # another build's: kept as if whole, because this one cannot tell
    except CheckpointError:
        return None
