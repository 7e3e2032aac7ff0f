"""The lease, driver by driver, on a clock by hand."""

import re
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest

from raymega.checkpoint.format.epochs import (
    KEPT_GRANTS,
    LEASES,
    grant_key,
    is_valid_epoch,
    newest_epoch,
    newest_grant,
)
from raymega.checkpoint.format.manifest import list_manifests
from raymega.errors import ConfigError, LeaseError, StorageError
from raymega.orchestrate.run_store.lease import Lease, hold_lease, supports_conditional_put
from raymega.orchestrate.run_store.lease_holder import this_process
from raymega.storage.retry import RetryingStore, RetryPolicy
from tests.support.fakes import BEGIN, FakeClock
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.format.test_epochs import save

DURATION_S = 30.0


class World:
    def __init__(self, store=None):
        self.store, self.clock, self.waited_s = store or MemoryStore(), FakeClock(), 0.0
        self.meanwhile = []

    def sleep(self, seconds):
        self.waited_s += seconds
        self.clock.advance(seconds)
        if self.meanwhile:
            self.meanwhile.pop(0)()

    def lease(self, host="a", *, gone=()):
        holder = replace(this_process(), host=host)
        return Lease(
            self.store,
            holder=holder,
            duration_s=DURATION_S,
            clock=self.clock,
            sleep=self.sleep,
            knows_gone=lambda other: other.host in gone,
        )

    def taken(self, host="a", **kwargs):
        lease = self.lease(host, **kwargs)
        lease.acquire()
        return lease


@pytest.fixture
def world():
    return World()


def test_first_driver_takes_epoch_1_at_once(world):
    assert world.taken().epoch == 1 and world.waited_s == 0
    grant = newest_grant(world.store)
    assert (grant.epoch, grant.holder.host, grant.is_released) == (1, "a", False)
    assert grant.since == grant.renewed < grant.expires


def test_attempts_are_epochs_and_the_first_is_the_one_taken(world):
    lease = world.taken()
    assert [lease.begin_attempt() for _ in range(3)] == [1, 2, 3]
    assert newest_epoch(world.store) == 3


def test_each_epoch_lists_the_checkpoints_before_it(world):
    lease = world.taken()
    lease.begin_attempt()
    key = save(world.store, 1, 10)
    lease.begin_attempt()
    given = newest_grant(world.store)
    assert is_valid_epoch(given, key)
    assert not is_valid_epoch(given, save(world.store, 1, 20)), "written when it was too late"


def test_old_grants_are_deleted_and_the_newest_stay(world):
    lease = world.taken()
    for _ in range(40):
        lease.begin_attempt()
    lease.renew()
    assert len(list(world.store.list(LEASES))) == KEPT_GRANTS
    assert newest_epoch(world.store) == lease.epoch == 40
    for _ in range(3):
        lease.begin_attempt()
        lease.renew()
    assert len(list(world.store.list(LEASES))) == KEPT_GRANTS


def test_driver_that_was_overtaken_deletes_no_grant(world):
    first = world.taken()
    first.begin_attempt()
    second = world.taken("b", gone=("a",))
    for _ in range(30):
        second.begin_attempt()
    grants = list(world.store.list(LEASES))
    first.renew()
    assert set(grants) <= set(world.store.list(LEASES))


def test_number_whose_grant_was_deleted_is_not_taken_again(world):
    """A driver is suspended between its last look and the put, while others come and go."""
    first = world.taken()
    first.begin_attempt()

    class Suspended(MemoryStore):
        def put(self, key, chunks, *, overwrite):
            if key == grant_key(2) and not overwrite:
                with suppress(KeyError):
                    self._objects.pop(key)
                for epoch in range(20, 40):
                    given = replace(
                        newest_grant(self), epoch=epoch, holder=replace(first.holder, token="b")
                    )
                    super().put(given.key, [given.to_json()], overwrite=True)
            super().put(key, chunks, overwrite=overwrite)

    store = Suspended()
    store._objects = world.store._objects
    first.store = store
    with pytest.raises(LeaseError):
        first.begin_attempt()
    assert first.epoch == 1


def test_number_is_above_those_of_checkpoints_that_were_copied_here(world):
    key = save(world.store, 7, 10)
    assert world.taken().begin_attempt() == 8
    assert list_manifests(world.store) == [key]


def test_driver_that_ended_keeps_nobody_waiting(world):
    with hold_lease(world.lease("a")) as lease:
        lease.begin_attempt()
    assert world.taken("b").epoch == 2 and world.waited_s == 0


def test_driver_that_began_no_attempt_uses_up_no_number(world):
    """A run that finds no room has had no attempt: the next driver begins the first one."""
    with hold_lease(world.lease("a")):
        pass
    assert newest_epoch(world.store) == 0
    assert world.taken("b").begin_attempt() == 1 and world.waited_s == 0


def test_epoch_that_was_given_back_does_not_rise_again(world):
    lease = world.taken("a")
    lease.release()
    lease.renew()
    assert newest_epoch(world.store) == 0


def test_epoch_of_another_driver_is_not_given_back(world):
    first = world.taken("a")
    world.taken("b", gone=["a"]).begin_attempt()
    first.release()
    assert newest_epoch(world.store) == 2


def test_driver_that_is_known_to_be_gone_keeps_nobody_waiting(world):
    world.taken("a")
    assert world.taken("b", gone=["a"]).epoch == 2 and world.waited_s == 0


def test_silent_driver_is_waited_for_as_long_as_its_lease_lasts(world):
    world.taken("a")
    assert world.taken("b").epoch == 2
    assert world.waited_s == pytest.approx(DURATION_S, rel=0.1)


def test_driver_that_was_lost_long_ago_is_waited_for_briefly(world):
    world.taken("a")
    world.clock.advance(2 * DURATION_S + 1)
    assert world.taken("b").epoch == 2
    assert world.waited_s == pytest.approx(DURATION_S * 2 / 5, rel=0.1)


def test_clock_that_is_ahead_takes_no_run_from_a_driver_at_work(world):
    class Ahead:
        monotonic = world.clock.monotonic

        def timestamp(self):
            return (BEGIN + timedelta(seconds=world.clock.now_s + 3 * DURATION_S)).isoformat()

    first = world.taken("a")
    first.begin_attempt()
    renewed_s = world.clock.now_s

    def renew():
        nonlocal renewed_s
        if world.clock.now_s - renewed_s >= DURATION_S / 5:
            renewed_s = world.clock.now_s
            first.renew()

    world.meanwhile = [renew] * 100
    second = world.lease("b")
    second._clock = Ahead()
    with pytest.raises(LeaseError, match="has a driver"):
        second.acquire()
    assert newest_epoch(world.store) == 1 and world.waited_s < DURATION_S / 2
    first.refuse_if_lost()


def test_second_driver_is_refused_at_the_first_sign_of_life_and_told_whose(world):
    first = world.taken("a")
    world.meanwhile = [lambda: None, first.renew]
    with pytest.raises(LeaseError) as caught:
        world.taken("b")
    assert caught.value.exit_code == 6
    assert world.waited_s < DURATION_S / 5
    text = str(caught.value)
    assert re.search(r"process \d+ on a, since 2026-\S+; its lease, epoch 1, was renewed at", text)
    assert "elastic.lease_s=30 s" in text and "expires at 2026-" in text
    assert newest_epoch(world.store) == 1


def test_second_driver_is_refused_when_the_holder_begins_another_attempt(world):
    first = world.taken("a")
    first.begin_attempt()
    world.meanwhile = [first.begin_attempt]
    with pytest.raises(LeaseError, match="epoch 2"):
        world.taken("b")


def test_driver_that_lets_go_while_another_waits_is_followed_at_once(world):
    first = world.taken("a")
    world.meanwhile = [first.release]
    assert world.taken("b").epoch == 2 and world.waited_s < DURATION_S / 10


def test_of_two_that_wait_one_wins(world):
    world.taken("a")
    third = world.lease("c", gone=["a"])
    world.meanwhile = [third.acquire]
    with pytest.raises(LeaseError, match="on c"):
        world.taken("b")


def test_of_two_that_put_at_once_one_wins(world):
    class Late(MemoryStore):
        """``meanwhile`` happens between a look at the leases and the put."""

        meanwhile = None

        def put(self, key, chunks, *, overwrite):
            then, self.meanwhile = self.meanwhile, None
            if then:
                then()
            super().put(key, chunks, overwrite=overwrite)

    world = World(Late())
    other = world.lease("c")
    world.store.meanwhile = other.acquire
    world.meanwhile = [other.renew]
    with pytest.raises(LeaseError, match="on c"):
        world.taken("b")
    assert other.epoch == newest_epoch(world.store) == 1


def test_put_whose_answer_was_lost_is_still_ones_own(world):
    class Twice(MemoryStore):
        """The client of the store tries again what was done."""

        def put(self, key, chunks, *, overwrite):
            data = b"".join(chunks)
            super().put(key, [data], overwrite=overwrite)
            super().put(key, [data], overwrite=overwrite)

    world = World(Twice())
    assert world.taken("a").begin_attempt() == 1


def test_driver_that_was_overtaken_learns_it_by_its_next_renewal(world):
    first = world.taken("a")
    first.begin_attempt()
    world.taken("b", gone=["a"])
    first.refuse_if_lost()  # it has no way to know yet
    before = newest_grant(world.store)
    first.renew()
    with pytest.raises(LeaseError, match=r"was taken by another driver .*on b has driven it since"):
        first.refuse_if_lost()
    first.release()
    assert newest_grant(world.store) == before, "the other's grant is as it was"


def test_driver_is_not_overtaken_by_the_attempt_that_it_begins(world):
    class AskedMeanwhile(MemoryStore):
        """Another thread, the journal's, asks for the run's driver while an epoch is taken."""

        ask = None

        def put(self, key, chunks, *, overwrite):
            super().put(key, chunks, overwrite=overwrite)
            if self.ask:
                assert self.ask() is None

    world = World(AskedMeanwhile())
    lease = world.taken("a")
    lease.begin_attempt()
    world.store.ask = lease.check
    assert lease.begin_attempt() == 2
    lease.refuse_if_lost()


def test_driver_that_was_overtaken_begins_no_attempt(world):
    first = world.taken("a")
    first.begin_attempt()
    world.taken("b", gone=["a"])
    with pytest.raises(LeaseError):
        first.begin_attempt()
    assert newest_epoch(world.store) == 2


def test_driver_that_stood_still_asks_before_it_does_anything(world):
    first = world.taken("a")
    world.clock.advance(DURATION_S + 1)
    world.taken("b")
    with pytest.raises(LeaseError):
        first.refuse_if_lost()


def test_control_loop_does_not_ask_the_store_while_renewals_do(world):
    lease = world.taken()
    world.store.list = lambda _prefix: pytest.fail("the control loop asked the store")
    for _ in range(10):
        world.clock.advance(DURATION_S / 10)
        lease.refuse_if_lost()


def test_store_that_fails_takes_nobodys_run_away(world):
    class Failing(MemoryStore):
        is_down = False

        def put(self, key, chunks, *, overwrite):
            if self.is_down:
                raise StorageError("down")
            super().put(key, chunks, overwrite=overwrite)

        def list(self, prefix):
            if self.is_down:
                raise StorageError("down")
            return super().list(prefix)

    world = World(Failing())
    lease = world.taken()
    world.store.is_down = True
    world.clock.advance(5 * DURATION_S)
    lease.renew()
    assert lease.age_s == 5 * DURATION_S
    lease.refuse_if_lost()
    lease.release()
    world.store.is_down = False
    lease.renew()
    assert lease.begin_attempt() == 1 and lease.age_s == 0


def test_renewals_are_signs_of_life(world):
    lease = world.taken()
    before = newest_grant(world.store)
    world.clock.advance(5.0)
    lease.renew()
    after = newest_grant(world.store)
    assert (after.renewals, after.since) == (before.renewals + 1, before.since)
    assert after.expires > before.expires


class Careless(MemoryStore):
    """As an S3 service that ignores conditions."""

    def put(self, key, chunks, *, overwrite):
        super().put(key, chunks, overwrite=True)


def test_probe_tells_a_store_that_creates_twice_and_leaves_nothing():
    for store, expected in ((MemoryStore(), True), (Careless(), False)):
        assert supports_conditional_put(store) is expected
        assert list(store.list("")) == []


def test_probe_whose_first_answer_was_lost_is_no_error_and_leaves_nothing():
    """The client of an object store tries again by itself, and finds its own object."""

    class Lossy(MemoryStore):
        has_lost = False

        def put(self, key, chunks, *, overwrite):
            super().put(key, chunks, overwrite=overwrite)
            if not self.has_lost:
                self.has_lost = True
                raise FileExistsError(key)

    store = Lossy()
    assert supports_conditional_put(store)
    assert list(store.list("")) == []


def test_control_loop_does_not_wait_for_a_store_that_is_down(world):
    """It asks again by itself, each time once; what its pauses cost, it would not hear its workers."""
    lease = world.taken()
    inner, slept = world.store, []
    lease.store = RetryingStore(inner, retry=RetryPolicy(pauses_s=(1.0,), sleep=slept.append))

    def fail(_prefix):
        raise StorageError("down")

    inner.list = fail
    world.clock.advance(2 * DURATION_S)
    lease.refuse_if_lost()
    assert slept == [] and lease.age_s == 2 * DURATION_S


def test_store_that_creates_twice_is_refused_before_anything_is_written():
    world = World(Careless())
    with (
        pytest.raises(ConfigError, match=r"lets an object be created twice.*such as Ceph"),
        hold_lease(world.lease()),
    ):
        pytest.fail("a driver is at work")
    assert list(world.store.list("")) == []
