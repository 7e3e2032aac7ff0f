"""Which checkpoints count when a run has had several drivers."""

from dataclasses import replace

import pytest

from raymega.checkpoint.format.epochs import (
    LeaseGrant,
    LeaseHolder,
    admitted,
    grant_key,
    is_valid_epoch,
    newest_epoch,
    newest_grant,
    read_grant,
    step_ranges,
)
from raymega.checkpoint.format.keys import CheckpointId, manifest_key
from raymega.checkpoint.format.manifest import Manifest, commit, find_restore, list_manifests
from tests.support.memory_store import MemoryStore

ME = LeaseHolder(host="a", pid=1, machine="m", started="9", token="t")


def grant(epoch, *manifests):
    return LeaseGrant(
        epoch=epoch, holder=ME, since="s", renewed="r", expires="2026-01-01T00:00:00+00:00", duration_s=3.0,
        manifests=tuple(manifests),
    )  # fmt: skip


def key(attempt, step):
    return manifest_key(CheckpointId(attempt=attempt, step=step))


def save(store, attempt, step):
    return commit(
        store,
        Manifest(
            step=step, attempt=attempt, created="", state={}, job={}, grid={}, boxes=()
        ),
    )  # fmt: skip


def put(store, given):
    store.put(given.key, [given.to_json()], overwrite=False)


class Slow(MemoryStore):
    """A run is taken over, and its first driver writes, while a reader is between its two looks."""

    def list(self, prefix):
        found = list(super().list(prefix))
        if prefix == "lease/" and not found:  # between the reader's two looks
            save(self, 1, 10)
            put(self, grant(2))
            save(self, 1, 20)
        yield from found


@pytest.fixture
def store():
    """A run that attempt 1 has saved at step 10 before attempt 2 was granted."""
    store = MemoryStore()
    put(store, grant(1))
    put(store, grant(2, save(store, 1, 10)))
    return store


def test_grant_is_read_as_it_was_written(store):
    assert newest_grant(store) == grant(2, key(1, 10))
    assert newest_epoch(store) == 2


def test_run_without_grants_counts_everything():
    store = MemoryStore()
    assert (newest_grant(store), newest_epoch(store)) == (None, 0)
    saved = save(store, 4, 10)
    assert list_manifests(store) == [saved]


def test_claims_of_earlier_builds_are_epochs():
    store = MemoryStore()
    store.put("attempts/000007.json", [b"{}"], overwrite=False)
    assert newest_epoch(store) == 7 and newest_grant(store) is None


def test_manifest_that_came_after_the_newer_epoch_is_no_checkpoint(store):
    late = save(store, 1, 20)
    assert list_manifests(store) == [key(1, 10)]
    assert find_restore(store).key == key(1, 10)
    newest = save(store, 2, 11)
    assert list_manifests(store) == [newest, key(1, 10)] and late in store.list("checkpoints/")


def test_manifest_that_came_late_does_not_count_in_later_epochs_either(store):
    save(store, 1, 20)
    put(store, grant(3, *list_manifests(store)))
    assert list_manifests(store) == [key(1, 10)]


def test_reader_that_sees_a_late_manifest_sees_the_grant_before_it():
    """The grants are looked at after the manifests, never before."""
    store = Slow()
    assert list_manifests(store) == []
    assert list_manifests(store) == []


def test_epoch_admits_its_own_later_ones_and_those_it_lists():
    given = grant(5, key(4, 10))
    assert [is_valid_epoch(given, key(a, 10)) for a in (3, 4, 5, 6)] == [False, True, True, True]
    assert not is_valid_epoch(given, key(4, 11))


def test_grant_before_a_damaged_one_still_rules(store, caplog):
    before = list_manifests(store)
    store.put(key(1, 999), [b""], overwrite=False)
    assert list_manifests(store) == before, "too late for the newest grant"
    store.put(grant_key(3), [b"{}"], overwrite=False)
    assert list_manifests(store) == before
    assert "lease/000003.json is damaged at byte 0 of 2" in caplog.text


def test_probes_and_strangers_are_no_grants(store):
    store.put("lease/probe-1a.json", [b"x"], overwrite=False)
    assert newest_epoch(store) == 2


@pytest.mark.parametrize(
    ("steps", "num_ranges"),
    [
        ([(1, 10)], 1),
        ([(1, step) for step in range(10, 5000, 10)], 1),
        ([(1, 10), (1, 20), (1, 25), (2, 30), (2, 40), (4, 7)], 4),
        ([(1, 5), (1, 6), (1, 8), (1, 9), (1, 20)], 3),
    ],
    ids=["one", "regular", "attempts", "irregular"],
)
def test_ranges_hold_the_checkpoints_and_no_others(steps, num_ranges):
    ranges = step_ranges(key(*each) for each in reversed(steps))
    assert len(ranges) == num_ranges
    held = [(at.attempt, at.step) for each in ranges for at in each.ids()]
    assert held == sorted(steps)


def test_grant_of_thousands_of_kept_checkpoints_is_small_and_admits_them_all():
    steps = [*range(100, 1_000_000, 100), 999_950, 999_975]
    given = replace(grant(2), checkpoints=step_ranges(key(1, step) for step in steps))
    assert len(given.to_json()) < 2_000
    store = MemoryStore()
    put(store, given)
    assert read_grant(store, 2) == given
    late = key(1, 999_990)
    assert set(admitted(store, [*(key(1, step) for step in steps), late])) == {
        key(1, step) for step in steps
    }


def test_grant_of_an_earlier_build_lists_keys():
    given = grant(2, key(1, 10))
    assert is_valid_epoch(given, key(1, 10)) and not is_valid_epoch(given, key(1, 20))
