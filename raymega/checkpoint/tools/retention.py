"""Which objects of a run's checkpoints may go. The rule is a pure function; prune carries it out."""

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
"""The metric of which less is better; a manifest has it when its step was evaluated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPolicy:
    """Which whole checkpoints stay: the ``last`` newest, and beside them those of two more rules.

    Attributes:
        last: So many of the newest; at least 1.
        every: Those of steps that it divides; 0 is none.
        best: So many of those with the least BEST_BY.
    """

    last: int
    every: int = 0
    best: int = 0


def kept(whole: Mapping[CheckpointId, float], keep: RetentionPolicy) -> set[CheckpointId]:
    """Those of ``whole`` (each with its BEST_BY, inf when it has none) that stay.

    Of several checkpoints of one step the newest counts: the others are branches given up.
    """
    found = set(sorted(whole, reverse=True)[: keep.last])
    current = {at.step: at for at in sorted(whole)}.values()
    if keep.every:
        found |= {at for at in current if at.step % keep.every == 0}
    measured = [at for at in current if isfinite(whole[at])]
    best = sorted(measured, key=lambda at: (whole[at], -at.attempt, -at.step))
    return found | set(best[: keep.best])


def expired_keys(
    keys: Iterable[str], whole: Mapping[CheckpointId, float], keep: RetentionPolicy
) -> tuple[str, ...]:
    """Keys to delete, manifests first, so that no reader meets a manifest without its files.

    Kept are the checkpoints of :func:`kept` and everything newer than the newest of them, which may
    be a save under way. The rest of what checkpoints wrote is either too old or was never finished.
    Foreign keys are not touched.

    Args:
        keys: Every key below ``checkpoints/``.
        whole: The checkpoints that could be restored, as for :func:`kept`.
        keep: The rule.
    """
    if not whole:
        return ()
    stay, newest = kept(whole, keep), max(whole)
    owners = {key: checkpoint_of(key) for key in keys}
    expired = [key for key, at in owners.items() if at and at < newest and at not in stay]
    return tuple(sorted(expired, key=lambda key: (not is_manifest(key), key)))


class Pruner:
    """Deletes by the rule; what it has found whole it does not look at again."""

    def __init__(self, store: Store, keep: RetentionPolicy) -> None:
        self._store, self._keep = store, keep
        self._whole: dict[CheckpointId, float] = {}

    def expired(self) -> tuple[str, ...]:
        """What may go now.

        Raises:
            StorageError: The store cannot be read.
        """
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
        """Delete what :meth:`expired` says and return it.

        Raises:
            StorageError: The store cannot be read, in which case nothing is deleted, or failed later.
        """
        keys = self.expired()
        for key in keys:
            self._store.delete(key)
        return keys


def _value(store: Store, key: str) -> float | None:
    """The checkpoint's BEST_BY, inf when it has none; None when it is not whole."""
    try:
        manifest = read_manifest(store, key)
        return None if broken_files(store, manifest) else manifest.metrics.get(BEST_BY, inf)
    except UnknownVersionError:
        return inf  # whether it is whole is not this build's to judge
    except CheckpointError:
        return None
