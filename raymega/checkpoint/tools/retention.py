"""Retention of a run's checkpoints: a pure function chooses what to delete, and Pruner deletes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite

from raymega.checkpoint.format.catalogue import (
    enter,
    lacking_entries,
    manifest_keys,
    saved_steps,
)
from raymega.checkpoint.format.epochs import admitted
from raymega.checkpoint.format.keys import (
    COMMITTED,
    CheckpointId,
    checkpoint_of,
    entry_prefix,
    folder_of,
    is_entry,
    is_manifest,
    manifest_key,
)
from raymega.checkpoint.format.manifest import (
    UnknownVersionError,
    broken_files,
    read_root,
)
from raymega.errors import CheckpointError
from raymega.storage.store import Store, delete_all

BEST_BY = "eval/loss"
"""Metric by which checkpoints are ranked, smallest first; in the manifest if the step was evaluated."""
ENTERED_AT_ONCE = 100
"""Most checkpoints without an entry in the catalogue that one pruning enters."""


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
    """Return the keys to delete: entries of the catalogue, then manifests, so that none outlives its files.

    Checkpoints of :func:`kept` stay, and so does everything newer than the newest of them, which may be
    a save under way. Other objects of checkpoints are too old, or belong to saves that never finished.
    Keys that no checkpoint uses are not touched.

    Args:
        keys: Keys below ``checkpoints/``.
        whole: Whole checkpoints, as for :func:`kept`.
        keep: Rules to apply.
    """
    # Without a whole checkpoint, what is there may be all that can be rescued.
    if not whole:
        return ()
    stay, newest = kept(whole, keep), max(whole)
    owners = {key: checkpoint_of(key) for key in keys}
    expired = [key for key, at in owners.items() if at and at < newest and at not in stay]
    return tuple(sorted(expired, key=lambda key: (not is_entry(key), not is_manifest(key), key)))


class Pruner:
    """Deletes the checkpoints of a run that a policy does not keep.

    Its requests do not grow with the checkpoints that RetentionPolicy.every keeps: of those it neither
    reads the manifests nor lists the files. A checkpoint that was found whole once is not examined again. After a
    first look it lists no catalogue either, where its caller tells of each save.
    """

    def __init__(self, store: Store, keep: RetentionPolicy) -> None:
        self._store, self._keep = store, keep
        self._whole: dict[CheckpointId, float] = {}
        self._is_entered = False  # every checkpoint has an entry in the catalogue
        # of the last look: checkpoints that are there; and steps saved since, whatever came of them
        self._known: set[CheckpointId] | None = None
        self._saved: set[int] = set()

    @property
    def known(self) -> Collection[CheckpointId] | None:
        """All checkpoints that the run has after the last pruning; None where that is not known."""
        return self._known

    def note_save(self, step: int) -> None:
        """Note that files of ``step`` were written, whether or not they became a checkpoint."""
        self._saved.add(step)

    def expired(self) -> tuple[str, ...]:
        """Return the keys that can be deleted now.

        Raises:
            StorageError: The store cannot be read.
        """
        # checkpoints that the newest lease accepts, and which of them are whole
        there = manifest_keys(self._store)
        committed = {at for key in there if (at := checkpoint_of(key))}
        accepted = {at for key in admitted(self._store, there) if (at := checkpoint_of(key))}
        whole = self._values(accepted)
        self._known = accepted if accepted == committed else None
        return self._expired(self._suspects(committed, whole), whole)

    def prune(self, saved: CheckpointId | None = None) -> tuple[str, ...]:
        """Delete the keys that can be deleted now and return them.

        Args:
            saved: Checkpoint that was just committed, where every save since the last call was noted by
                :meth:`note_save`, and no other driver writes; None for a look at all of the store.

        Raises:
            StorageError: The store cannot be read, and nothing was deleted; or a deletion failed.
        """
        keys = (
            self.expired() if saved is None or self._known is None else self._expired_since(saved)
        )
        known, self._known = self._known, None  # a deletion that fails is followed by a look at all
        # entries, then manifests in requests of their own, so that none outlives its files
        entries = [key for key in keys if is_entry(key)]
        manifests = [key for key in keys if is_manifest(key)]
        delete_all(self._store, entries)
        delete_all(self._store, manifests)
        delete_all(self._store, keys[len(entries) + len(manifests) :])
        self._complete_catalogue()
        if known is not None and self._is_entered:
            self._known = known - {at for key in manifests if (at := checkpoint_of(key))}
        return keys

    def _expired_since(self, saved: CheckpointId) -> tuple[str, ...]:
        """Return the keys that can be deleted now, by what is known and the saves that were noted."""
        known = self._known or set()
        known.add(saved)
        whole = self._values(known)
        gone = {at.step for at in known - kept(whole, self._keep)}
        steps = self._saved | self._recent(whole) | gone
        keys = [
            key
            for step in sorted(steps)
            for prefix in (folder_of(step), entry_prefix(step))
            for key in self._store.list(prefix)
        ]
        # one that was deleted meanwhile, by hand for example, counts for none of those to keep
        newest = map(manifest_key, sorted(whole, reverse=True)[: self._keep.last])
        if not {*newest} <= {*keys}:
            return self.expired()
        found = self._expired(keys, whole)
        self._saved = {step for step in self._saved if step > saved.step}
        return found

    def _expired(self, keys: Iterable[str], whole: Mapping[CheckpointId, float]) -> tuple[str, ...]:
        return expired_keys(keys, whole, self._keep) if whole else ()

    def _values(self, ages: Collection[CheckpointId]) -> dict[CheckpointId, float]:
        """Return BEST_BY of each checkpoint that counts as whole, from memory where it is known.

        Only those that the newest rule or the best rule looks at are examined, and steps that several
        attempts saved; the others count as whole, which at most keeps them.
        """
        num_saved = Counter(at.step for at in ages)
        found: dict[CheckpointId, float] = {}
        examined: dict[CheckpointId, float] = {}
        # newest first: those are the ones to examine
        for at in sorted(ages, reverse=True):
            is_assumed = (
                len(examined) >= self._keep.last and not self._keep.best and num_saved[at.step] == 1
            )
            if is_assumed:
                found[at] = inf
                continue
            value = self._whole[at] if at in self._whole else _value(self._store, manifest_key(at))
            if value is not None:
                found[at] = examined[at] = value
        self._whole = examined
        return found

    def _suspects(
        self, committed: set[CheckpointId], whole: Mapping[CheckpointId, float]
    ) -> Iterator[str]:
        """Yield the keys of all steps at which there may be something to delete."""
        stay = kept(whole, self._keep)
        steps = saved_steps(self._store) - {at.step for at in stay}
        steps |= {at.step for at in committed - stay} | self._recent(whole)
        for step in sorted(steps):
            yield from self._store.list(folder_of(step))
        # Also the entries of folders that were deleted by hand.
        yield from (key for key in self._store.list(COMMITTED) if checkpoint_of(key) not in stay)

    def _recent(self, whole: Iterable[CheckpointId]) -> set[int]:
        """Return the steps whose folders are listed although all that was committed in them may stay.

        Unfinished saves lie there only beside a checkpoint that followed them, so they are found while that
        one is among the newest.
        """
        return {at.step for at in sorted(whole, reverse=True)[: self._keep.last + 1]}

    def _complete_catalogue(self) -> None:
        """Enter checkpoints that other builds or a copy by hand left without an entry, some at a time."""
        if self._is_entered:
            return
        lacking = lacking_entries(self._store, manifest_keys(self._store))
        for at in lacking[:ENTERED_AT_ONCE]:
            enter(self._store, at)
        self._is_entered = len(lacking) <= ENTERED_AT_ONCE


def _value(store: Store, key: str) -> float | None:
    """Return a checkpoint's BEST_BY, inf without an evaluation; None when it is not whole."""
    try:
        manifest = read_root(store, key)
        return None if broken_files(store, manifest) else manifest.metrics.get(BEST_BY, inf)
    except UnknownVersionError:
        return inf  # another build's: kept as if whole, because this one cannot tell
    except CheckpointError:
        return None
