"""Checkpoints of a run with many are known from grant and log, as a listing would find them."""

import pytest

from raymega.checkpoint.format import commit_log
from raymega.checkpoint.format.commit_log import CommitLog, known_checkpoints
from raymega.checkpoint.format.epochs import LEASES, LOGS, log_key, newest_grant
from raymega.checkpoint.format.keys import CheckpointId, checkpoint_of, manifest_key
from raymega.checkpoint.format.manifest import find_restore, list_manifests, valid_checkpoints
from tests.unit.checkpoint.format.test_epochs import save
from tests.unit.orchestrate.run_store.test_lease import World


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Three checkpoints are many."""
    monkeypatch.setattr(commit_log, "FEW_CHECKPOINTS", 3)


def run_of(*steps, lease=None, log=None, world=None):
    """A world whose driver has begun an attempt and committed ``steps``."""
    world = world or World()
    lease = lease or world.taken()
    attempt = lease.begin_attempt()
    log = CommitLog(world.store, attempt)
    for step in steps:
        at = CheckpointId(attempt=attempt, step=step)
        log.begin(at, None)
        save(world.store, attempt, step)
        log.end(at)
    return world, lease, log


def listed(store):
    return [checkpoint_of(key) for key in list_manifests(store)]


def refuse_listings(store, monkeypatch):
    real = store.list

    def list_only_leases(prefix):
        assert prefix.startswith((LEASES, "attempts/")), f"{prefix} is listed"
        return real(prefix)

    monkeypatch.setattr(store, "list", list_only_leases)
    monkeypatch.setattr(store, "folders", list_only_leases, raising=False)


def test_few_checkpoints_are_listed_and_no_log_is_written():
    world, *_ = run_of(10, 20, 30)
    assert known_checkpoints(world.store) is None
    assert not list(world.store.list(LOGS))


def test_many_are_known_over_attempts_as_a_listing_finds_them(monkeypatch):
    world, lease, _ = run_of(10, 20, 30, 40, 50)
    run_of(35, 45, lease=lease, world=world)
    expected = listed(world.store)
    assert [(at.attempt, at.step) for at in expected[:3]] == [(2, 45), (2, 35), (1, 50)]
    refuse_listings(world.store, monkeypatch)
    assert known_checkpoints(world.store) == expected
    assert lease.begin_attempt() == 3
    assert valid_checkpoints(world.store) == expected
    assert len(newest_grant(world.store).checkpoints) == 2, "two ranges"


def test_a_driver_killed_between_manifest_and_entry_leaves_its_commit_known():
    world, _lease, log = run_of(10, 20, 30, 40)
    at = CheckpointId(attempt=1, step=50)
    log.begin(at, None)
    assert at not in known_checkpoints(world.store), "no manifest is there yet"
    save(world.store, 1, 50)
    assert known_checkpoints(world.store)[0] == at
    # a commit that never came to its manifest stays unknown, later ones do not
    log.begin(CheckpointId(attempt=1, step=60), None)
    assert known_checkpoints(world.store)[0] == at


def test_a_manifest_that_comes_after_the_grant_does_not_count():
    world, lease, log = run_of(10, 20, 30, 40)
    late = CheckpointId(attempt=1, step=50)
    log.begin(late, None)  # then this driver is suspended, and another takes the run
    world.taken("b", gone=(lease.holder.host,))
    save(world.store, 1, 50)
    assert late not in valid_checkpoints(world.store) and late not in listed(world.store)


def test_deleted_checkpoints_are_passed_over_and_none_is_broken(monkeypatch):
    world, _, _log = run_of(10, 20, 30, 40, 50)
    for step in (40, 50):
        world.store.delete(manifest_key(CheckpointId(attempt=1, step=step)))
    refuse_listings(world.store, monkeypatch)
    found = find_restore(world.store)
    assert found.manifest.step == 30 and not found.broken


def test_pruned_checkpoints_leave_the_log_where_the_run_is_known_exactly():
    world, _lease, log = run_of(10, 20, 30, 40, 50)
    known = {CheckpointId(attempt=1, step=step) for step in (10, 30, 50)}
    log.begin(CheckpointId(attempt=1, step=60), known)
    assert known_checkpoints(world.store) is None, "three are few"
    log.end(CheckpointId(attempt=1, step=60))
    save(world.store, 1, 60)
    log.begin(CheckpointId(attempt=1, step=70), known | {CheckpointId(attempt=1, step=60)})
    assert {at.step for at in known_checkpoints(world.store)} == {10, 30, 50, 60}


@pytest.mark.parametrize("content", [b"", b"{", b'{"epoch": 1}'])
def test_a_damaged_log_is_followed_by_a_listing(content):
    world, *_ = run_of(10, 20, 30, 40)
    world.store.put(log_key(1), [content], overwrite=True)
    assert known_checkpoints(world.store) is None
    assert find_restore(world.store).manifest.step == 40


def test_a_damaged_grant_is_followed_by_a_listing():
    world, lease, _ = run_of(10, 20, 30, 40)
    run_of(50, lease=lease, world=world)
    world.store.put(newest_grant(world.store).key, [b"{"], overwrite=True)
    assert known_checkpoints(world.store) is None
    assert find_restore(world.store).manifest.step == 50


def test_logs_of_older_epochs_are_deleted():
    world, lease, _ = run_of(10, 20, 30, 40)
    run_of(50, lease=lease, world=world)
    lease.renew()
    assert list(world.store.list(LOGS)) == [log_key(2)]


def test_an_epoch_that_is_given_back_leaves_the_log_of_the_one_before():
    world, first, _ = run_of(10, 20, 30, 40)
    run_of(50, 60, lease=first, world=world)
    expected = listed(world.store)
    # a driver that renews its lease while it waits for room, and ends before an attempt
    second = world.taken("b", gone=("a",))
    second.renew()
    second.release()
    assert newest_grant(world.store).epoch == 2
    assert known_checkpoints(world.store) == expected
    # the next one, whose grant decides for good which checkpoints count
    third = world.taken("c", gone=("a",))
    assert third.begin_attempt() == 3
    assert valid_checkpoints(world.store) == listed(world.store) == expected
    # from its attempt on the log of the epoch before is not needed
    third.renew()
    assert not list(world.store.list(LOGS))
