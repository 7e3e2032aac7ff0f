"""The invariants of a run on a simulated fleet, looked at while it lives."""

import threading

from raymega.checkpoint.format.epochs import newest_epoch
from raymega.checkpoint.format.keys import (
    ROOT,
    CheckpointId,
    checkpoint_of,
    step_of_folder,
)
from raymega.checkpoint.format.manifest import (
    broken_files,
    list_manifests,
    parse_manifest,
    read_root,
)
from raymega.orchestrate.core.state import State
from raymega.plan.batch import samples_after
from raymega.storage.store import folders_below
from tests.scale.fleet.disturbances import MINUTE_S

CALM_LIMIT_S = 25 * MINUTE_S
"""Longest time without a step while nothing happens to a fleet with room, a driver and a sound store."""
LOOK_EVERY_S = 10 * MINUTE_S
DRIVERS_OVERLAP_S = 60.0
"""Longest time for which a driver at work may not know that another has taken the run: a lease, and retries."""
CALLS_A_PROCESS = 6
UNFINISHED = 4
"""Folders of saves that never came to an end, at most."""


class Witness:
    """What was seen of a run; every method raises AssertionError for what must not be.

    Attributes:
        trained_by: Samples of the history of each save, as ranges (first, end).
        committed: Time of each commit that counts.
        num_steps: Steps that were trained, of all attempts.
    """

    def __init__(self, fleet):
        self.fleet, self.timeline = fleet, fleet.timeline
        self.trained_by, self.committed, self.num_steps, self.num_late = {}, {}, 0, 0
        self._last_step = 0  # of all commits: it is asked for in each tick
        self.num_held = 0  # attempts that continued from the workers' memory
        self._newest_attempt, self._stepped_s = 0, self.timeline.now_s
        self._looked_s, self._stepping_since_s = self.timeline.now_s, None
        self._taken_s = {}  # time at which each epoch was taken
        self._num_threads, self.most_recovery_s = threading.active_count(), 0.0

    @property
    def is_done(self):
        """True when the last step is committed."""
        return self._last_step >= self.fleet.plan.job.run.steps

    # One driver.

    def see_start(self, driver, message):
        """An attempt begins: with a new number, under the newest epoch, from the newest checkpoint that was known."""
        accuse = self.fleet.accuse
        if message.attempt <= self._newest_attempt:
            accuse(f"attempt {message.attempt} begins after attempt {self._newest_attempt}")
        self._newest_attempt = message.attempt
        start = checkpoint_of(message.restore)
        known = [at for at, when_s in self.committed.items() if when_s < driver.found_s]
        if known and (start is None or start < max(known)):
            accuse(f"attempt {message.attempt} begins from {start} and not from {max(known)}")

    def see_driver(self, driver):
        """A driver has made a tick: it is not one of two, and it holds what it uses and no more."""
        if driver.controller is None:
            return
        now_s, state = self.timeline.now_s, driver.controller.state
        if state.state is State.SCHEDULING:
            driver.found_s = max(driver.found_s, state.since_s)
        for other in self.fleet.drivers:
            if other is not driver and other.lease.epoch == driver.lease.epoch > 0:
                both = f"drivers {driver.number} and {other.number}"
                self.fleet.accuse(f"{both} have epoch {driver.lease.epoch}")
        if newest_epoch(self.fleet.objects) <= driver.lease.epoch or self.fleet.store.fails:
            driver.lost_s = now_s
        elif now_s - max(driver.lost_s, self._lost_s(driver)) > DRIVERS_OVERLAP_S:
            self.fleet.accuse(f"driver {driver.number} goes on beside another that has the run")
        if now_s - self._looked_s > LOOK_EVERY_S and state.state is State.RUNNING:
            self._looked_s = now_s
            self._see_what_it_holds(driver)

    def see_grant(self, epoch):
        """An epoch is taken, again if it was given back."""
        self._taken_s[epoch] = self.timeline.now_s

    def _lost_s(self, driver):
        """Return when another took the run; the driver's last tick is older where the taker's start held up the fleet."""
        return min(at_s for epoch, at_s in self._taken_s.items() if epoch > driver.lease.epoch)

    # Each sample once.

    def see_save(self, attempt, step, trained):
        self.trained_by[CheckpointId(attempt=attempt, step=step)] = trained

    def see_commit(self, key):
        """A manifest was written: if it counts, its history has each sample once and its files are there."""
        at, objects = checkpoint_of(key), self.fleet.objects
        if at.attempt < newest_epoch(objects):
            self.num_late += 1
            return
        manifest = parse_manifest(objects.get(key), key=key)
        samples = samples_after(at.step, self.fleet.plan.job.data)
        if self.trained_by.get(at) != ((0, samples),):
            self.fleet.accuse(
                f"the history of {at} has the samples {self.trained_by.get(at)}, not {samples}"
            )
        if manifest.state["samples"] != samples or manifest.step != at.step:
            self.fleet.accuse(f"{key} says {manifest.state}, at {samples} samples")
        self._see_files(key)
        self.committed[at] = self.timeline.now_s
        self._last_step = max(self._last_step, at.step)

    def see_step(self, training):
        now_s = self.timeline.now_s
        self.most_recovery_s = max(self.most_recovery_s, now_s - self._stepped_s)
        self.num_steps, self._stepped_s = self.num_steps + 1, now_s

    # Every recovery ends.

    def see_progress(self):
        fleet, now_s = self.fleet, self.timeline.now_s
        room = sum(node.gpus for node in fleet.cluster.nodes.values() if node.leaves_s is None)
        is_able = room >= fleet.plan.grid.world_size and not fleet.store.fails
        if not is_able or any(each.is_paused for each in fleet.drivers) or self.is_done:
            fleet.disturbances.note()
        since_s = max(fleet.disturbances.last_s, self._stepped_s)
        if now_s - since_s > CALM_LIMIT_S:
            where = [
                (each.number, each.controller and each.controller.state) for each in fleet.drivers
            ]
            fleet.accuse(f"no step for {(now_s - self._stepped_s) / MINUTE_S:.0f} minutes; {where}")

    # Nothing leaks.

    def _see_what_it_holds(self, driver):
        fleet, group = self.fleet, driver.group
        slots = group._slots.slots
        own = {each for each in fleet.cluster.groups.values() if each.owner is driver}
        if own != {slot.group for slot in slots}:
            fleet.accuse(f"{len(own)} placement groups are held, of which {len(slots)} slots know")
        actors = {each for each in fleet.cluster.actors if each.owner is driver}
        known = {slot.actor for slot in (*slots, *group._monitors._by_node.values())} - {None}
        if actors - known:
            fleet.accuse(f"{len(actors - known)} processes that no slot has")
        calls = len(group._calls.refs(with_holds=True))
        if calls > CALLS_A_PROCESS * len(actors) + 1:
            fleet.accuse(f"{calls} calls are pending to {len(actors)} processes")
        shards = driver.context.committer._shards._by_step
        if len(shards) > UNFINISHED:
            fleet.accuse(f"shards of {len(shards)} saves are kept")
        # the drained node's slots are given back
        job = fleet.plan.job
        most = fleet.plan.grid.world_size + job.elastic.spares
        leaving = sum(node.leaves_s is not None for node in fleet.cluster.nodes.values())
        if len(slots) > most + leaving * fleet.gpus and self._is_calm():
            fleet.accuse(f"{len(slots)} slots are held, {most} are needed")
        self._see_folders()

    def _is_calm(self):
        return self.timeline.now_s - self.fleet.disturbances.last_s > CALM_LIMIT_S / 3

    def see_released(self, driver):
        """A driver that ends by itself leaves nothing behind."""
        fleet = self.fleet
        left = [each for each in fleet.cluster.groups.values() if each.owner is driver]
        left += [each for each in fleet.cluster.actors if each.owner is driver]
        if left:
            fleet.accuse(f"driver {driver.number} leaves {left}")
        if driver.group._calls.refs(with_holds=True):
            fleet.accuse(f"driver {driver.number} leaves calls pending")

    # The store.

    def _see_files(self, key):
        broken = broken_files(self.fleet.objects, read_root(self.fleet.objects, key))
        if broken:
            self.fleet.accuse(f"{key} lacks {sorted(broken)}")

    def _to_keep(self):
        """Return the newest checkpoint of each step that keep_every keeps."""
        every = self.fleet.plan.job.checkpoint.keep_every
        newest = {}
        for at in sorted(self.committed):
            if every and at.step % every == 0:
                newest[at.step] = at
        return newest

    def _see_folders(self):
        folders = {step_of_folder(name) for name in folders_below(self.fleet.objects, ROOT)} - {
            None
        }
        keep = self._to_keep()
        most = len(keep) + self.fleet.plan.job.checkpoint.keep_last + UNFINISHED
        if len(folders) > most:
            self.fleet.accuse(f"{len(folders)} steps have files, {most} at most may")

    def see_end(self):
        """All that is kept can be restored; nothing is left of a driver."""
        fleet = self.fleet
        keys = list_manifests(fleet.objects)
        for key in keys:
            self._see_files(key)
        there = {checkpoint_of(key) for key in keys}
        if lost := set(self._to_keep().values()) - there:
            fleet.accuse(f"checkpoints that were to be kept are gone: {sorted(lost)}")
        if self.committed and max(self.committed) not in there:
            fleet.accuse(f"the newest checkpoint, {max(self.committed)}, is gone")
        self._see_folders()
        if fleet.cluster.groups or fleet.cluster.actors:
            fleet.accuse(f"left at the end: {fleet.cluster.groups}, {fleet.cluster.actors}")
        if threading.active_count() > self._num_threads:
            fleet.accuse(f"threads are left: {threading.enumerate()}")
