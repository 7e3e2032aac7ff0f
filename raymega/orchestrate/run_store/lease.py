"""The lease on a run: one driver at a time, and nothing of one that has lost it is ever chosen.

A driver takes the next epoch by a create-only put, which one of several drivers wins, and renews it
while it lives. Another driver takes the epoch after it when the holder has let go, is gone, or has
not renewed for as long as it said. The lease makes two drivers rare; it is fence that makes them
harmless, whatever clocks say. What an epoch is to readers is checkpoint.fence's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from threading import Event, Lock, Thread
from uuid import uuid4

from raymega.checkpoint.format.epochs import (
    LEASES,
    LeaseGrant,
    LeaseHolder,
    newest_epoch,
    newest_grant,
    read_grant,
)
from raymega.checkpoint.format.keys import checkpoint_of
from raymega.checkpoint.format.manifest import list_manifests
from raymega.errors import ConfigError, Fault, LeaseError, RaymegaError
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.run_store.lease_holder import is_gone
from raymega.storage.store import Store

log = logging.getLogger(__name__)

RENEWALS = 5
"""Signs of life in the time after which others may take the run."""
LOOKS = 20
"""How often a driver that waits looks for one, in that time."""


class Lease:
    """One driver's lease on the run in ``store``. Safe from several threads once it is taken."""

    def __init__(
        self,
        store: Store,
        *,
        holder: LeaseHolder,
        duration_s: float,
        clock: Clock,
        sleep: Callable[[float], None] = time.sleep,
        knows_gone: Callable[[LeaseHolder], bool] = is_gone,
    ) -> None:
        """Touches nothing yet.

        Args:
            store: The run's own folder.
            holder: This driver.
            duration_s: How long after its last sign of life others wait.
            clock: Its date is for people and for leases that expired long ago; durations decide.
            sleep: To wait with.
            knows_gone: Whether a driver's process has ended, for certain.
        """
        self.store, self.holder, self._clock = store, holder, clock
        self.duration_s, self._sleep, self._knows_gone = duration_s, sleep, knows_gone
        self._grant: LeaseGrant | None = None
        self._has_begun = False
        self._taken_by: LeaseGrant | None = None
        self._confirmed_s = self._asked_s = clock.monotonic()
        self._lock = Lock()

    @property
    def epoch(self) -> int:
        """The newest that this driver has; 0 before it has any."""
        return self._grant.epoch if self._grant else 0

    @property
    def age_s(self) -> float:
        """Since the store last said that the run is this driver's."""
        return self._clock.monotonic() - self._confirmed_s

    def acquire(self) -> None:
        """Become the run's driver. Blocks as long as the present one's lease lasts, at most.

        Raises:
            LeaseError: Another driver holds the run, and lives.
            StorageError: The store fails.
        """
        while True:
            before, found = newest_epoch(self.store), newest_grant(self.store)
            if found is not None and not self._is_over(found):
                self._outlast(found)
            if self._put_next(max(before, found.epoch if found else 0)):
                log.info("this driver, %s, has epoch %d", self.holder, self.epoch)
                return

    def begin_attempt(self) -> int:
        """Number of the attempt that begins now, its epoch: the one taken, then one more each time.

        Raises:
            LeaseError: Another driver has taken the run.
            StorageError: The store fails.
        """
        is_mine = newest_epoch(self.store) <= self.epoch
        if not is_mine or (self._has_begun and not self._put_next(self.epoch)):
            raise LeaseError(self._lost_fault(newest_grant(self.store)))
        self._has_begun = True
        return self.epoch

    def renew(self) -> None:
        """A sign of life, and a look whether somebody has taken the run. Never raises."""
        try:
            with self._lock:
                if self._grant and not self._taken_by and not self._grant.is_released:
                    self._grant = self._sign(self._grant)
            self.check()
        except RaymegaError as error:
            log.warning("the lease on the run was not renewed, training goes on: %s", error)

    def check(self) -> LeaseGrant | None:
        """Ask the store who has taken the run from this driver; None while nobody has.

        Raises:
            StorageError: The store fails.
        """
        if self._taken_by is None:
            asked_s = self._clock.monotonic()
            if newest_epoch(self.store) > self.epoch:
                newest = newest_grant(self.store)
                # An epoch that another thread of this driver is taking is not yet in self.epoch.
                if newest is None or newest.holder.token != self.holder.token:
                    self._taken_by = newest
            self._confirmed_s = asked_s
        return self._taken_by

    def refuse_if_lost(self) -> None:
        """For the control loop: asks the store only when nobody could for as long as a lease lasts.

        A driver that stood still that long, whole machine or process, asks before it does anything.

        Raises:
            LeaseError: Another driver has taken the run.
        """
        now_s = self._clock.monotonic()
        pause_s = self.duration_s / RENEWALS
        if now_s - self._confirmed_s > self.duration_s and now_s - self._asked_s > pause_s:
            self._asked_s = now_s
            try:
                self.check()
            except RaymegaError as error:
                log.warning("who drives the run is not known, training goes on: %s", error)
        if self._taken_by is not None:
            raise LeaseError(self._lost_fault(self._taken_by))

    def release(self) -> None:
        """The next driver need not wait. Never raises; of no effect when the run was taken."""
        try:
            with self._lock:
                if self._grant and self.check() is None:
                    self._grant = self._sign(self._grant, is_released=True)
        except RaymegaError as error:
            log.warning("the lease on the run is not released, but will expire: %s", error)

    def _sign(self, grant: LeaseGrant, *, is_released: bool = False) -> LeaseGrant:
        now, expires = self._now_and_expiry()
        signed = grant.renew(now=now, expires=expires, is_released=is_released)
        self.store.put(signed.key, [signed.to_json()], overwrite=True)
        return signed

    def _put_next(self, before: int) -> bool:
        """Whether the epoch after ``before`` is now this driver's; of several drivers one wins it.

        The number is above that of every checkpoint, too, which a copy from another store may have
        brought. What is listed first is what was there before the grant.
        """
        manifests = list_manifests(self.store)
        copied = [at.attempt for key in manifests if (at := checkpoint_of(key))]
        now, expires = self._now_and_expiry()
        grant = LeaseGrant(
            epoch=max([before, *copied]) + 1,
            holder=self.holder,
            since=self._grant.since if self._grant else now,
            renewed=now,
            expires=expires,
            duration_s=self.duration_s,
            manifests=tuple(manifests),
        )
        with self._lock:
            try:
                self.store.put(grant.key, [grant.to_json()], overwrite=False)
            except FileExistsError:  # also when a put was done and its answer lost
                if read_grant(self.store, grant.epoch).holder.token != self.holder.token:
                    return False
            self._grant = grant
        return True

    def _now_and_expiry(self) -> tuple[str, str]:
        now = self._clock.timestamp()
        expires = datetime.fromisoformat(now) + timedelta(seconds=self.duration_s)
        return now, expires.isoformat()

    def _is_over(self, grant: LeaseGrant) -> bool:
        """Nobody need wait for it. By the date only when it expired so long ago that no clock is
        that wrong."""
        now = datetime.fromisoformat(self._clock.timestamp())
        late_s = (now - datetime.fromisoformat(grant.expires)).total_seconds()
        is_old = late_s > grant.duration_s
        return grant.is_released or is_old or self._knows_gone(grant.holder)

    def _outlast(self, grant: LeaseGrant) -> None:
        """Wait until it is over; refuse at the first sign of life.

        Raises:
            LeaseError: There was one.
        """
        log.warning(
            "the run is held by %s until %s; waiting up to %.0f s for a sign of life",
            grant.holder, grant.expires, grant.duration_s,
        )  # fmt: skip
        deadline_s = self._clock.monotonic() + grant.duration_s
        while self._clock.monotonic() < deadline_s:
            self._sleep(grant.duration_s / LOOKS)
            now = newest_grant(self.store)
            if now is not None and self._is_over(now):
                return
            if now is not None and (now.epoch, now.renewals) != (grant.epoch, grant.renewals):
                raise LeaseError(self._held_fault(now))

    def _held_fault(self, by: LeaseGrant) -> Fault:
        return Fault(
            fact=f"the run in {self.store.uri} has a driver: {by.holder}, since {by.since}; its "
            f"lease, epoch {by.epoch}, was renewed at {by.renewed} and expires at {by.expires}",
            rule=f"a run has one driver at a time; a lease holds for elastic.lease_s="
            f"{by.duration_s:g} s after its last renewal",
            remedy=f"wait for its end, or stop it (on {by.holder.host}: kill {by.holder.pid}) and "
            "start this job again; or take another run.name",
        )

    def _lost_fault(self, by: LeaseGrant | None) -> Fault:
        who = f"{by.holder} has driven it since {by.since}, epoch {by.epoch}" if by else "unknown"
        return Fault(
            fact=f"the run in {self.store.uri} was taken by another driver ({who}); this one is "
            f"{self.holder}, epoch {self.epoch}",
            rule=f"a driver that shows no sign of life for elastic.lease_s={self.duration_s:g} s "
            "loses its run, and nothing that it writes afterwards counts",
            remedy="leave the run to the other driver, or stop that one first",
        )


@contextmanager
def hold_lease(lease: Lease) -> Iterator[Lease]:
    """Take the lease, renew it beside the body, and release it at the end.

    Raises:
        ConfigError: The store cannot tell two drivers apart.
        LeaseError: Another driver holds the run, and lives.
    """
    if not supports_conditional_put(lease.store):
        raise ConfigError(_unfenced(lease.store))
    lease.acquire()
    is_over = Event()
    pause_s = lease.duration_s / RENEWALS

    def renew() -> None:
        while not is_over.wait(pause_s):
            lease.renew()

    thread = Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        is_over.set()
        thread.join(pause_s)
        lease.release()


def _unfenced(store: Store) -> Fault:
    return Fault(
        fact=f"{store.uri} lets an object be created twice",
        rule="a run has one driver at a time, which a create-only put decides; here two drivers would "
        "both train, and write over each other's checkpoints",
        remedy="set checkpoint.uri to a folder that all nodes see, to S3, or to a service that honours "
        "If-None-Match, such as Ceph or MinIO of today",
    )


def supports_conditional_put(store: Store) -> bool:
    """Whether the store refuses to create an object twice, on which a lease rests.

    Raises:
        StorageError: The store fails.
    """
    key = f"{LEASES}probe-{uuid4().hex}.json"
    store.put(key, [b"first"], overwrite=False)
    try:
        store.put(key, [b"second"], overwrite=False)
    except FileExistsError:
        return store.get(key) == b"first"
    else:
        return False
    finally:
        store.delete(key)
