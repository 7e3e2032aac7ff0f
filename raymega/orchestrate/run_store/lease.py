"""The lease on a run, which admits one driver at a time and fences off drivers that have lost it.

A driver takes the next epoch by a create-only put, which only one of several drivers wins, and renews its
lease while it runs. Another driver takes the following epoch when the holder has released the lease, its
process is gone, or it was seen not to renew for the lease's duration. Clocks make two drivers at once unlikely;
epochs make them harmless without clocks: readers ignore checkpoints that an older epoch wrote too late
(``checkpoint/format/epochs.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from threading import Event, Lock, Thread
from uuid import uuid4

from raymega.checkpoint.format.epochs import (
    LEASES,
    LeaseGrant,
    LeaseHolder,
    damaged_epoch,
    newest_epoch,
    newest_grant,
    read_grant,
    step_ranges,
    superseded_grants,
)
from raymega.checkpoint.format.keys import manifest_key
from raymega.checkpoint.format.manifest import valid_checkpoints
from raymega.errors import ConfigError, Fault, LeaseError, RaymegaError
from raymega.orchestrate.core.clock import Clock
from raymega.orchestrate.run_store.lease_holder import is_gone
from raymega.storage.json_objects import DamagedError
from raymega.storage.retry import at_once
from raymega.storage.store import Store, delete_all

log = logging.getLogger(__name__)

RENEWALS = 5
"""Number of renewals in the duration of a lease."""
LOOKS = 20
"""Number of looks of a waiting driver for a renewal, in the duration of a lease."""
OLD_RENEWALS = 2
"""Number of renewals for which a lease that expired long ago by its dates is watched."""


class Lease:
    """The lease of one driver on the run in ``store``; safe from several threads once it is acquired."""

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
        """Prepare a lease; the store is not accessed yet.

        Args:
            store: Store of the run's own folder.
            holder: Process of this driver.
            duration_s: Time after the last renewal during which other drivers wait, in seconds.
            clock: Clock; its durations decide, its dates only how long a lease is watched.
            sleep: Function that waits for a number of seconds.
            knows_gone: Function that returns whether a driver's process has certainly ended.
        """
        self.store, self.holder, self._clock = store, holder, clock
        self.duration_s, self._sleep, self._knows_gone = duration_s, sleep, knows_gone
        self._grant: LeaseGrant | None = None
        self._has_begun = False
        self._tidied_epoch = 0
        self._taken_by: LeaseGrant | None = None
        # times at which the store last answered that this driver has the newest epoch, and was last asked
        self._confirmed_s = self._asked_s = clock.monotonic()
        self._lock = Lock()

    @property
    def epoch(self) -> int:
        """Newest epoch of this driver; 0 before it has one."""
        return self._grant.epoch if self._grant else 0

    @property
    def age_s(self) -> float:
        """Seconds since the store last confirmed that this driver has the run."""
        return self._clock.monotonic() - self._confirmed_s

    def acquire(self) -> None:
        """Become the run's driver; blocks for the duration of the present holder's lease at most.

        Raises:
            LeaseError: Another driver holds the run and has renewed its lease meanwhile.
            StorageError: The store fails.
        """
        # again after each epoch that another driver was faster to take
        while True:
            before, found = newest_epoch(self.store), newest_grant(self.store)
            if damaged := damaged_epoch(self.store, found):
                if self._is_mended(damaged):
                    continue
            elif found is not None and not self._has_ended(found):
                self._outlast(found)
            if self._put_next(max(before, found.epoch if found else 0)):
                log.info("this driver, %s, has epoch %d", self.holder, self.epoch)
                return

    def begin_attempt(self) -> int:
        """Return the number of the next attempt, which is its epoch; every attempt needs a new one.

        Raises:
            LeaseError: Another driver has taken the run.
            StorageError: The store fails.
        """
        # the first attempt has the epoch that ``acquire`` took
        is_mine = newest_epoch(self.store) <= self.epoch
        if not is_mine or (self._has_begun and not self._put_next(self.epoch)):
            raise LeaseError(self._lost_fault(newest_grant(self.store)))
        self._has_begun = True
        return self.epoch

    def renew(self) -> None:
        """Renew the lease, and check whether another driver has taken the run. Never raises."""
        try:
            with self._lock:
                if self._grant and not self._taken_by and not self._grant.is_released:
                    self._grant = self._sign(self._grant)
            if self.check(is_once=True) is None:
                self._delete_superseded()
        except RaymegaError as error:
            log.warning("the lease on the run was not renewed, training continues: %s", error)

    def check(self, *, is_once: bool = False) -> LeaseGrant | None:
        """Return the grant of the driver that has taken the run, as the store has it; else None.

        Whoever asks at intervals asks only ``is_once`` each time: a control loop that waited for a store that is
        down would not hear its workers.

        Raises:
            StorageError: The store fails.
        """
        if self._taken_by is None:
            asked_s, store = self._clock.monotonic(), at_once(self.store) if is_once else self.store
            if newest_epoch(store) > self.epoch:
                newest = newest_grant(store)
                # it may be this driver's own: another thread takes one, and self.epoch is set afterwards
                if newest is None or newest.holder.token != self.holder.token:
                    self._taken_by = newest
            self._confirmed_s = asked_s
        return self._taken_by

    def refuse_if_lost(self) -> None:
        """Raise if another driver has taken the run; the control loop calls this at each tick.

        The store is asked only when it has not confirmed the lease for a whole duration, for example after
        this process or machine was suspended. Otherwise the thread that renews asks it.

        Raises:
            LeaseError: Another driver has taken the run.
        """
        # a store that is down is asked once per renewal interval, and does not stop the run
        now_s = self._clock.monotonic()
        pause_s = self.duration_s / RENEWALS
        if now_s - self._confirmed_s > self.duration_s and now_s - self._asked_s > pause_s:
            self._asked_s = now_s
            try:
                self.check(is_once=True)
            except RaymegaError as error:
                log.warning("the run's driver is not known, training continues: %s", error)
        if self._taken_by is not None:
            raise LeaseError(self._lost_fault(self._taken_by))

    def release(self) -> None:
        """Release the lease, so that the next driver need not wait; no effect if the run was taken.

        An epoch in which no attempt began is given back: nothing was written under its number, which
        the next driver takes. Never raises.
        """
        try:
            with self._lock:
                if not self._grant or self.check() is not None:
                    return
                if self._has_begun:
                    self._grant = self._sign(self._grant, is_released=True)
                else:
                    self.store.delete(self._grant.key)
                    self._grant = None
        except RaymegaError as error:
            log.warning("the lease on the run is not released, but will expire: %s", error)

    def _delete_superseded(self) -> None:
        """Delete old grants, once in each epoch: a listing of them is read at every renewal."""
        # an epoch without an attempt may be given back: then the log of the one before names its commits
        if self._has_begun and self._tidied_epoch != self.epoch:
            self._tidied_epoch = self.epoch
            delete_all(self.store, superseded_grants(self.store, self.epoch))

    def _sign(self, grant: LeaseGrant, *, is_released: bool = False) -> LeaseGrant:
        now, expires = self._now_and_expiry()
        signed = grant.renew(now=now, expires=expires, is_released=is_released)
        self.store.put(signed.key, [signed.to_json()], overwrite=True)
        return signed

    def _put_next(self, before: int) -> bool:
        """Take the epoch after ``before``, and return whether this driver won it.

        The epoch is also above those of all checkpoints, which may have been copied from another store.
        """
        # list before the put: the grant names the checkpoints that older epochs wrote in time
        checkpoints = valid_checkpoints(self.store)
        now, expires = self._now_and_expiry()
        grant = LeaseGrant(
            epoch=max([before, *(at.attempt for at in checkpoints)]) + 1,
            holder=self.holder,
            since=self._grant.since if self._grant else now,
            renewed=now,
            expires=expires,
            duration_s=self.duration_s,
            checkpoints=step_ranges(map(manifest_key, checkpoints)),
            has_commit_log=True,
        )
        # of several drivers that create the object, one succeeds
        with self._lock:
            try:
                self.store.put(grant.key, [grant.to_json()], overwrite=False)
            except FileExistsError:  # raised too by the retry of a put whose answer was lost
                if self._token_of(grant.epoch) != self.holder.token:
                    return False
            # the number may be long past, and its grant deleted, if this process was suspended before the put
            if newest_epoch(self.store) > grant.epoch:
                return False
            self._grant = grant
        return True

    def _now_and_expiry(self) -> tuple[str, str]:
        now = self._clock.timestamp()
        expires = datetime.fromisoformat(now) + timedelta(seconds=self.duration_s)
        return now, expires.isoformat()

    def _has_ended(self, grant: LeaseGrant) -> bool:
        return grant.is_released or self._knows_gone(grant.holder)

    def _outlast(self, grant: LeaseGrant) -> None:
        """Wait until another driver's lease is over.

        Raises:
            LeaseError: That driver has renewed it.
        """
        # one that is old by its dates is watched too, but briefly: one of the two clocks may be wrong
        is_old = _is_old(grant, now=self._clock.timestamp())
        watch_s = grant.duration_s * (OLD_RENEWALS / RENEWALS if is_old else 1)
        log.warning(
            "the run is held by %s until %s; waiting up to %.0f s for a sign of life",
            grant.holder, grant.expires, watch_s,
        )  # fmt: skip
        # so long on this clock without a renewal
        deadline_s = self._clock.monotonic() + watch_s
        while self._clock.monotonic() < deadline_s:
            self._sleep(grant.duration_s / LOOKS)
            now = newest_grant(self.store)
            # gone: the holder has given an epoch without an attempt back
            if now is None or now.epoch < grant.epoch or self._has_ended(now):
                return
            if (now.epoch, now.renewals) != (grant.epoch, grant.renewals):
                raise LeaseError(self._held_fault(now))

    def _is_mended(self, epoch: int) -> bool:
        """Return whether the holder of a damaged grant writes it anew within the duration of a lease.

        A driver at work renews its grant several times in that time, so no other sign is needed.
        """
        log.warning("waiting up to %g s for its driver, if there is one", self.duration_s)
        deadline_s = self._clock.monotonic() + self.duration_s
        while self._clock.monotonic() < deadline_s:
            self._sleep(self.duration_s / LOOKS)
            if self._token_of(epoch):
                return True
        return False

    def _token_of(self, epoch: int) -> str:
        """Return the token of an epoch's holder; empty where its grant is damaged or given back."""
        try:
            return read_grant(self.store, epoch).holder.token
        except (KeyError, DamagedError):
            return ""

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
    """Take the lease, renew it in a thread during the body, and release it at the end.

    Raises:
        ConfigError: The store lets an object be created twice, so a lease would admit two drivers.
        LeaseError: Another driver holds the run and renews its lease.
    """
    if not supports_conditional_put(lease.store):
        raise ConfigError(
            fact=f"{lease.store.uri} lets an object be created twice",
            rule="a run has one driver at a time, which a create-only put decides; here two drivers would "
            "both train, and write over each other's checkpoints",
            remedy="set checkpoint.uri to a folder that all nodes see, to S3, or to a service that honours "
            "If-None-Match, such as Ceph or MinIO of today",
        )
    lease.acquire()
    # a thread of its own, so that a busy control loop does not lose the lease
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


def driver_of(store: Store, *, now: str) -> LeaseGrant | None:
    """Return the grant of the driver that holds the run in ``store``; None when no driver does, by the clock.

    Raises:
        StorageError: The store fails.
    """
    found = newest_grant(store)
    if found is None or found.is_released or _is_old(found, now=now) or is_gone(found.holder):
        return None
    return found


def _is_old(grant: LeaseGrant, *, now: str) -> bool:
    """Return whether ``grant`` expired a whole duration ago, by the dates of two machines."""
    late = datetime.fromisoformat(now) - datetime.fromisoformat(grant.expires)
    return late.total_seconds() > grant.duration_s


def supports_conditional_put(store: Store) -> bool:
    """Return whether the store refuses to create an object twice, on which leases depend.

    Raises:
        StorageError: The store fails.
    """
    key = f"{LEASES}probe-{uuid4().hex}.json"
    try:
        # no other process has this key: it exists where the answer to the first try was lost
        with suppress(FileExistsError):
            store.put(key, [b"first"], overwrite=False)
        # a second create must fail and leave the first content
        try:
            store.put(key, [b"second"], overwrite=False)
        except FileExistsError:
            return store.get(key) == b"first"
        return False
    finally:
        store.delete(key)
