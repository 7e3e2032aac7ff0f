"""What is deleted: never the newest whole checkpoint, never a save under way, no foreign file."""

from math import inf
from shutil import rmtree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymega.checkpoint.format import manifest as manifests
from raymega.checkpoint.format.keys import (
    COMMITTED,
    CheckpointId,
    checkpoint_of,
    data_file,
    entry_key,
    folder_of,
    is_manifest,
    manifest_key,
)
from raymega.checkpoint.format.manifest import find_restore, list_manifests
from raymega.checkpoint.tools import retention
from raymega.checkpoint.tools.retention import Pruner, RetentionPolicy, expired_keys, kept
from raymega.errors import StorageError
from raymega.storage.local import LocalStore
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import (
    MODELS,
    FailingStore,
    make_grid,
    save_checkpoint,
    save_shards,
)

GRID, MODEL = make_grid("dp2"), MODELS["llama-tied"]


def _at(attempt, step):
    return CheckpointId(attempt=attempt, step=step)


def _unmeasured(ages):
    return dict.fromkeys(ages, inf)


def _keys(at, *, has_manifest=True):
    data = [folder_of(at.step) + data_file(attempt=at.attempt, rank=rank) for rank in range(2)]
    return [*data, manifest_key(at)] if has_manifest else data


def test_newest_are_kept_and_the_rest_goes_manifests_first():
    ages = [_at(1, step) for step in (100, 200, 300, 400)]
    keys = [key for at in ages for key in _keys(at)]
    gone = expired_keys(keys, _unmeasured(ages), RetentionPolicy(last=2))
    assert set(gone) == {*_keys(ages[0]), *_keys(ages[1])}
    assert [is_manifest(key) for key in gone] == [True, True, False, False, False, False]


def test_nothing_goes_while_nothing_is_whole():
    assert expired_keys(_keys(_at(1, 100)), {}, RetentionPolicy(last=1)) == ()


def test_leftovers_of_dead_attempts_and_failed_saves_go_but_not_a_save_under_way():
    whole = [_at(1, 100), _at(2, 150)]
    dead = _keys(_at(1, 200), has_manifest=False) + _keys(_at(2, 140), has_manifest=False)
    running = _keys(_at(2, 160), has_manifest=False) + _keys(_at(3, 100), has_manifest=False)
    keys = [key for at in whole for key in _keys(at)] + dead + running
    assert set(expired_keys(keys, _unmeasured(whole), RetentionPolicy(last=2))) == set(dead)


def test_foreign_files_are_left_alone():
    keys = ["checkpoints/notes.txt", "checkpoints/step-00000100/mine.safetensors"]
    assert expired_keys(keys, _unmeasured([_at(9, 900)]), RetentionPolicy(last=1)) == ()


_AGES = st.builds(_at, st.integers(1, 3), st.integers(0, 5))


@settings(max_examples=100, deadline=None)
@given(ages=st.sets(_AGES, min_size=1), partial=st.sets(_AGES), keep_last=st.integers(1, 4))
def test_the_newest_whole_checkpoints_always_survive(ages, partial, keep_last):
    keys = [key for at in ages for key in _keys(at)]
    keys += [key for at in partial - ages for key in _keys(at, has_manifest=False)]
    left = set(keys) - set(expired_keys(keys, _unmeasured(ages), RetentionPolicy(last=keep_last)))
    kept = sorted(ages)[-keep_last:]
    assert {key for key in left if is_manifest(key)} == {manifest_key(at) for at in kept}
    assert all(set(_keys(at)) <= left for at in kept)


def test_prune_deletes_files_and_leaves_what_can_be_restored(tmp_path):
    store = LocalStore(tmp_path)
    saved = [save_checkpoint(store, MODEL, GRID, step=step) for step in (100, 200, 300)]
    save_shards(store, MODEL, GRID, step=150)
    gone = Pruner(store, RetentionPolicy(last=2)).prune()
    assert list_manifests(store) == [saved[2].key, saved[1].key]
    assert len(gone) == 4 + 2 and Pruner(store, RetentionPolicy(last=2)).prune() == ()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "committed",
        "step-00000200",
        "step-00000300",
    ]


def test_prune_does_not_count_a_broken_checkpoint():
    store = MemoryStore()
    saved = [save_checkpoint(store, MODEL, GRID, step=step) for step in (100, 200, 300)]
    store.delete(next(iter(saved[2].file_sizes())))
    Pruner(store, RetentionPolicy(last=1)).prune()
    assert find_restore(store).manifest == saved[1]
    assert list_manifests(store) == [saved[2].key, saved[1].key]


def test_prune_leaves_a_checkpoint_of_another_version_to_its_age():
    store = MemoryStore()
    saved = [save_checkpoint(store, MODEL, GRID, step=step) for step in (100, 200)]
    text = store.get(saved[0].key).replace(b'"version": 2', b'"version": 9')
    store.put(saved[0].key, [text], overwrite=True)
    assert Pruner(store, RetentionPolicy(last=2)).prune() == ()


def test_prune_deletes_nothing_when_the_store_cannot_tell():
    store = FailingStore()
    for step in (100, 200):
        save_checkpoint(store, MODEL, GRID, step=step)
    before = list(store.list(""))
    store.failures["size"] = 1
    with pytest.raises(StorageError):
        Pruner(store, RetentionPolicy(last=1)).prune()
    assert list(store.list("")) == before


def test_checkpoints_that_every_divides_stay_for_ever():
    whole = _unmeasured([_at(1, step) for step in range(50, 501, 50)])
    stay = kept(whole, RetentionPolicy(last=1, every=200))
    assert sorted(at.step for at in stay) == [200, 400, 500]


def test_of_a_step_that_was_saved_twice_the_branch_given_up_goes():
    whole = _unmeasured([_at(1, 200), _at(1, 300), _at(2, 200), _at(2, 250)])
    assert kept(whole, RetentionPolicy(last=1, every=100)) == {
        _at(1, 300),
        _at(2, 200),
        _at(2, 250),
    }


def test_best_are_those_of_least_loss_and_newer_ones_of_equal_loss():
    losses = {100: 3.0, 200: 2.0, 300: 2.0, 400: inf, 500: 4.0}
    whole = {_at(1, step): loss for step, loss in losses.items()}
    assert kept(whole, RetentionPolicy(last=1, best=1)) == {_at(1, 300), _at(1, 500)}
    assert kept(whole, RetentionPolicy(last=1, best=9)) == {
        _at(1, step) for step in (100, 200, 300, 500)
    }


@settings(max_examples=100, deadline=None)
@given(
    whole=st.dictionaries(_AGES, st.sampled_from([1.0, 2.0, inf]), min_size=1),
    last=st.integers(1, 3),
    every=st.integers(0, 3),
    best=st.integers(0, 3),
)
def test_more_rules_never_keep_less(whole, last, every, best):
    stay = kept(whole, RetentionPolicy(last=last, every=every, best=best))
    assert set(sorted(whole)[-last:]) <= stay <= set(whole)
    assert len(stay) <= last + best + (len({at.step for at in whole}) if every else 0)


def test_pruner_goes_by_the_loss_in_the_manifests_and_looks_at_each_once():
    store = CountingStore()
    losses = {100: 2.5, 200: 1.5, 300: 2.0, 400: 9.0}
    for step, loss in losses.items():
        save_checkpoint(store, MODEL, GRID, step=step, metrics={"eval/loss": loss})
    pruner = Pruner(store, RetentionPolicy(last=1, best=1))
    assert {checkpoint_of(key).step for key in pruner.expired()} == {100, 300}
    looked = store.num_sizes
    pruner.prune()
    assert store.num_sizes == looked
    assert [key.split("/")[1] for key in list_manifests(store)] == [
        "step-00000400",
        "step-00000200",
    ]


class CountingStore(MemoryStore):
    num_sizes = 0

    def size(self, key):
        self.num_sizes += 1
        return super().size(key)


def test_entries_of_the_catalogue_go_first():
    ages = [_at(1, step) for step in (100, 200)]
    keys = [key for at in ages for key in (*_keys(at), entry_key(at))]
    gone = expired_keys(keys, _unmeasured(ages), RetentionPolicy(last=1))
    assert gone[:2] == (entry_key(ages[0]), manifest_key(ages[0])) and len(gone) == 4


def test_entry_of_a_folder_that_was_deleted_by_hand_counts_for_nothing(tmp_path):
    store = LocalStore(tmp_path)
    saved = [save_checkpoint(store, MODEL, GRID, step=step) for step in (100, 200, 300)]
    rmtree(tmp_path / folder_of(200))
    assert list_manifests(store) == [saved[2].key, saved[0].key]
    rmtree(tmp_path / folder_of(300))
    assert list_manifests(store) == [saved[0].key]


def test_pruning_names_the_entries_that_are_there_and_takes_those_of_deleted_folders(tmp_path):
    store = LocalStore(tmp_path)
    saved = [save_checkpoint(store, MODEL, GRID, step=step) for step in (100, 200, 300)]
    without, of_folder = (entry_key(_at(1, step)) for step in (100, 200))
    store.delete(without)  # as an older build leaves it
    rmtree(tmp_path / folder_of(200))
    gone = Pruner(store, RetentionPolicy(last=1)).prune()
    assert gone[:2] == (of_folder, saved[0].key) and without not in gone
    assert list(store.list(COMMITTED)) == [entry_key(_at(1, 300))]


def test_newest_checkpoint_whose_manifest_was_deleted_by_hand_is_none():
    store = MemoryStore()
    saved = [save_checkpoint(store, MODEL, GRID, step=step) for step in (100, 200, 300)]
    for manifest in saved[1:]:
        store.delete(manifest.key)
    assert list_manifests(store) == [saved[0].key]
    restore = find_restore(store)
    assert restore.manifest == saved[0] and restore.broken == ()
    # its files and its entry go once a later one is there
    newer = save_checkpoint(store, MODEL, GRID, step=400)
    Pruner(store, RetentionPolicy(last=1)).prune()
    assert {checkpoint_of(key).step for key in store.list("checkpoints/")} == {400}
    assert list_manifests(store) == [newer.key]


def test_of_a_kept_step_saved_twice_the_whole_one_stays():
    store = MemoryStore()
    old, new = (
        save_checkpoint(store, MODEL, GRID, step=200, attempt=attempt) for attempt in (1, 2)
    )
    for step in (210, 220):
        save_checkpoint(store, MODEL, GRID, step=step, attempt=2)
    store.delete(next(iter(new.file_sizes())))
    Pruner(store, RetentionPolicy(last=1, every=100)).prune()
    assert old.key in list_manifests(store) and new.key not in list_manifests(store)


@pytest.mark.parametrize("is_deleted_by_hand", [True, False])
def test_step_saved_again_is_found_where_the_driver_ended_before_its_entry(
    monkeypatch, is_deleted_by_hand
):
    store = MemoryStore()
    for step in (10, 20):
        save_checkpoint(store, MODEL, GRID, step=step, attempt=1)
    if is_deleted_by_hand:
        for key in list(store.list(folder_of(20))):
            store.delete(key)

    def end(_store, _at):
        raise StorageError("the driver ends here")

    with monkeypatch.context() as patched:
        patched.setattr(manifests, "enter", end)
        with pytest.raises(StorageError):
            save_checkpoint(store, MODEL, GRID, step=20, attempt=2)
    assert find_restore(store).key == manifest_key(_at(2, 20))
    # the next pruning enters what lacks an entry, and an older branch is no longer kept
    Pruner(store, RetentionPolicy(last=1)).prune()
    assert list_manifests(store) == [manifest_key(_at(2, 20))]
    assert list(store.list(COMMITTED)) == [entry_key(_at(2, 20))]


def test_both_checkpoints_of_a_step_that_was_saved_twice_have_entries():
    store = MemoryStore()
    for attempt in (1, 2):
        save_checkpoint(store, MODEL, GRID, step=10, attempt=attempt)
    assert list(store.list(COMMITTED)) == [entry_key(_at(1, 10)), entry_key(_at(2, 10))]
    assert len(list_manifests(store)) == 2


def test_pruner_that_is_told_of_each_save_deletes_what_a_look_at_all_would(monkeypatch):
    """Also files of a save that failed, of which no catalogue tells."""
    store = MemoryStore()
    save_checkpoint(store, MODEL, GRID, step=10)
    pruner = Pruner(store, RetentionPolicy(last=2, every=40))
    pruner.prune()
    for step in (20, 30, 40, 50, 60, 70):
        pruner.note_save(step)
        if step == 30:
            save_shards(store, MODEL, GRID, step=step)
            continue
        save_checkpoint(store, MODEL, GRID, step=step)
        wanted = Pruner(store, RetentionPolicy(last=2, every=40)).expired()
        with monkeypatch.context() as patched:
            patched.setattr(retention, "manifest_keys", None)  # no look at all
            assert pruner.prune(_at(1, step)) == wanted
    steps = {checkpoint_of(key).step for key in store.list("checkpoints/")}
    assert steps == {40, 60, 70}


@pytest.mark.parametrize("deleted", [20, 30])
def test_pruner_that_is_told_of_each_save_counts_no_checkpoint_that_was_deleted_meanwhile(deleted):
    """By hand, or by `raymega checkpoint prune`: as many as the policy says are there all the same."""
    store = MemoryStore()
    pruner = Pruner(store, RetentionPolicy(last=3))
    for step in (10, 20, 30):
        save_checkpoint(store, MODEL, GRID, step=step)
        pruner.note_save(step)
        pruner.prune(_at(1, step))
    for key in [*store.list(folder_of(deleted))]:
        store.delete(key)
    pruner.note_save(40)
    save_checkpoint(store, MODEL, GRID, step=40)
    pruner.prune(_at(1, 40))
    left = {checkpoint_of(key).step for key in store.list("checkpoints/")}
    assert left == {10, 20, 30, 40} - {deleted}
