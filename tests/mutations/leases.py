"""Planted mistakes in the lease and its fence, and the story of two drivers that shows each of them.

`tests.mutations.outcomes` calls `outcome` with each of them planted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class LeaseMutation:
    """A row: ``old`` in the package's ``file`` becomes ``new``; ``caught`` is how the story then ends."""

    name: str
    file: str
    old: str
    new: str
    caught: str


LEASE_MUTATIONS = (
    LeaseMutation(
        name="readers count what an older epoch wrote too late",
        file="checkpoint/format/epochs.py",
        old="return at.attempt >= grant.epoch or at in before",
        new="return True",
        caught="a late checkpoint is chosen",
    ),
    LeaseMutation(
        name="readers look at the grants before the manifests",
        file="checkpoint/format/manifest.py",
        old="    keys = admitted(store, manifest_keys(store))",
        new="    from raymega.checkpoint.format.epochs import is_valid_epoch, newest_grant\n\n"
        "    grant = newest_grant(store)\n"
        "    keys = [key for key in manifest_keys(store) if grant is None or is_valid_epoch(grant, key)]",
        caught="a late checkpoint is chosen by a slow reader",
    ),
    LeaseMutation(
        name="a grant does not list what was there before",
        file="orchestrate/run_store/lease.py",
        old="checkpoints=step_ranges(map(manifest_key, checkpoints)),",
        new="",
        caught="the run has lost its checkpoint",
    ),
    LeaseMutation(
        name="a driver commits without asking for newer epochs",
        file="orchestrate/driver/checkpoint_committer.py",
        old="return newest_epoch(self._store) > self._attempt",
        new="return False",
        caught="the first driver takes its late checkpoint for committed",
    ),
    LeaseMutation(
        name="a driver that stood still does not ask before it goes on",
        file="orchestrate/run_store/lease.py",
        old="if now_s - self._confirmed_s > self.duration_s and",
        new="if now_s - self._confirmed_s > 1e9 and",
        caught="the first driver goes on",
    ),
    LeaseMutation(
        name="a renewal is no sign of life",
        file="orchestrate/run_store/lease.py",
        old="(now.epoch, now.renewals) != (grant.epoch, grant.renewals)",
        new="now.epoch != grant.epoch",
        caught="a third driver is let in",
    ),
    LeaseMutation(
        name="an epoch may be taken twice",
        file="orchestrate/run_store/lease.py",
        old="[grant.to_json()], overwrite=False)",
        new="[grant.to_json()], overwrite=True)",
        caught="the first driver begins another attempt",
    ),
)


def outcome(_folder: Path) -> str:
    """How it ends when a driver stands still past its lease, a second one takes the run, and it wakes."""
    from raymega.checkpoint.format.epochs import newest_grant
    from raymega.checkpoint.format.manifest import find_restore, list_manifests
    from raymega.errors import LeaseError
    from raymega.events import CheckpointCommitted
    from tests.support.fakes import FakeWorkers
    from tests.unit.checkpoint.format.test_epochs import Slow, save
    from tests.unit.orchestrate.driver.test_checkpoint_committer import make_saves
    from tests.unit.orchestrate.run_store.test_lease import DURATION_S, World

    if list_manifests(Slow()):
        return "a late checkpoint is chosen by a slow reader"
    world = World()
    first = world.taken("a")
    first.begin_attempt()
    save(world.store, 1, 10)
    world.clock.advance(DURATION_S + 1)
    second = world.taken("b")
    second.begin_attempt()
    save(world.store, 1, 20)
    chosen = find_restore(world.store).manifest
    if chosen is None:
        return "the run has lost its checkpoint"
    if chosen.step != 10:
        return "a late checkpoint is chosen"
    saves, workers = make_saves(world.store), FakeWorkers(2, step=30)
    for rank in range(2):
        saves.handle_report(workers.shard(rank))
    if isinstance(saves.pop_outcomes()[0], CheckpointCommitted):
        return "the first driver takes its late checkpoint for committed"
    world.meanwhile = [second.renew] * 3
    for goes_on, ending in (
        (lambda: world.taken("c"), "a third driver is let in"),
        (first.refuse_if_lost, "the first driver goes on"),
    ):
        try:
            goes_on()
        except LeaseError:
            continue
        return ending
    first._put_next(first.epoch)  # as if it had not asked
    is_seconds = newest_grant(world.store).holder.host == "b"
    return "sound" if is_seconds else "the first driver begins another attempt"
