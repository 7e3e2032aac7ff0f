"""The manifest's format, the commit, and which checkpoint a run restores from."""

import json
import re
from dataclasses import replace

import pytest

from raymega.checkpoint.format.manifest import (
    UnknownVersionError,
    broken_files,
    commit,
    find_restore,
    list_manifests,
    parse_manifest,
    read_manifest,
)
from raymega.errors import CheckpointError, StorageError
from raymega.storage.local import LocalStore
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.support import (
    MODELS,
    STATE,
    FailingStore,
    assemble_shards,
    make_grid,
    save_checkpoint,
    save_shards,
)

GRID, MODEL = make_grid("dp2"), MODELS["llama-tied"]


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return LocalStore(tmp_path / "run") if request.param == "local" else MemoryStore()


def _save(store, *, step, attempt=1):
    return save_checkpoint(store, MODEL, GRID, step=step, attempt=attempt)


def _spoil(store, key, change):
    store.put(key, [change(store.get(key))], overwrite=True)


def test_manifest_reads_back_equal_and_says_its_size():
    manifest = _save(MemoryStore(), step=100)
    text = manifest.to_json()
    assert parse_manifest(text, key="k") == manifest
    assert manifest.state == STATE and isinstance(manifest.state["tokens"], float)
    assert json.loads(text)["total_bytes"] == sum(box.num_bytes for box in manifest.boxes) > 0


def test_file_sizes_are_those_of_the_store(store):
    manifest = _save(store, step=100)
    sizes = {key: store.size(key) for key in store.list("") if not key.endswith(".json")}
    assert manifest.file_sizes() == sizes and len(sizes) == 2
    assert broken_files(store, manifest) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"version": 1}', '{"boxes": []}', "\ud800"])
def test_text_that_is_no_manifest_is_refused(text):
    with pytest.raises(CheckpointError, match="k is damaged at byte"):
        parse_manifest(text.encode("utf-8", "surrogatepass"), key="k")


def test_another_version_is_refused_by_its_number():
    text = json.dumps({"version": 5, "crc32": 0, "checkpoint": {}})
    with pytest.raises(
        UnknownVersionError, match="k has version 5; this build reads versions up to 4"
    ):
        parse_manifest(text, key="k")


AS_WRITTEN = {
    "now": lambda text: text,
    "before, with spaces": lambda text: json.dumps(json.loads(text)),
    "by hand": lambda text: json.dumps(json.loads(text), indent=2) + "\n",
}


@pytest.mark.parametrize("write", AS_WRITTEN.values(), ids=AS_WRITTEN.keys())
def test_manifest_is_read_however_it_is_laid_out_and_any_changed_value_is_noticed(write):
    manifest = _save(MemoryStore(), step=100)
    text = write(manifest.to_json())
    assert parse_manifest(text, key="k") == manifest
    for name, old, new in (("samples", 800, 801), ("num_bytes", 2560, 2561)):
        changed, count = re.subn(rf'("{name}": ?){old}', rf"\g<1>{new}", text, count=1)
        assert count == 1
        with pytest.raises(CheckpointError, match="its own checksum"):
            parse_manifest(changed, key="k")


def test_value_of_a_wrong_type_is_refused():
    manifest = replace(_save(MemoryStore(), step=100), attempt="1")
    with pytest.warns(UserWarning, match="serialized value"):
        text = manifest.to_json()
    with pytest.raises(CheckpointError, match="attempt"):
        parse_manifest(text, key="k")


def test_commit_creates_once_and_can_be_repeated(store):
    manifest = _save(store, step=100)
    assert commit(store, manifest) == manifest.key
    with pytest.raises(CheckpointError, match="exists already"):
        commit(store, replace(manifest, created="later"))
    assert read_manifest(store, manifest.key) == manifest


def test_list_is_newest_first_and_only_manifests(store):
    for step, attempt in ((100, 1), (200, 1), (150, 2), (1000, 1)):
        _save(store, step=step, attempt=attempt)
    store.put("checkpoints/notes.json", [b"{}"], overwrite=False)
    assert list_manifests(store) == [
        "checkpoints/step-00000150/manifest-a0002.json",
        "checkpoints/step-00001000/manifest-a0001.json",
        "checkpoints/step-00000200/manifest-a0001.json",
        "checkpoints/step-00000100/manifest-a0001.json",
    ]


def test_restore_of_an_empty_store_is_a_fresh_start(store):
    restore = find_restore(store)
    assert (restore.manifest, restore.key, restore.broken) == (None, "", ())


def test_restore_takes_the_newest(store):
    _save(store, step=100)
    newest = _save(store, step=200)
    assert find_restore(store).manifest == newest
    assert find_restore(store).key == newest.key


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda store, key: store.delete(key), "is missing"),
        (lambda store, key: _spoil(store, key, lambda data: data[:-1]), "bytes, not"),
        (lambda store, key: _spoil(store, key, lambda data: data + b"x"), "bytes, not"),
    ],
    ids=["missing", "torn", "longer"],
)
def test_restore_falls_back_when_a_data_file_is_not_whole(store, damage, said):
    older, newer = _save(store, step=100), _save(store, step=200)
    key = sorted(newer.file_sizes())[1]
    damage(store, key)
    restore = find_restore(store)
    assert restore.manifest == older
    (fault,) = restore.broken
    assert fault.fact.startswith(key) and said in fault.fact


def test_restore_falls_back_when_a_manifest_is_damaged(store):
    older, newer = _save(store, step=100), _save(store, step=200)
    _spoil(store, newer.key, lambda data: data[: len(data) // 2])
    restore = find_restore(store)
    assert restore.manifest == older and newer.key in restore.broken[0].fact


def test_restore_passes_over_what_failed_to_load(store):
    older, newer = _save(store, step=100), _save(store, step=200)
    assert find_restore(store, skip={newer.key}).manifest == older


def test_data_without_a_manifest_are_no_checkpoint(store):
    older = _save(store, step=100)
    save_shards(store, MODEL, GRID, step=200)
    assert find_restore(store).manifest == older and find_restore(store).broken == ()


def test_two_attempts_of_one_step_never_touch_each_other(store):
    first = _save(store, step=100, attempt=1)
    before = {key: store.get(key) for key in store.list("")}
    shards = save_shards(store, MODEL, GRID, step=100, attempt=2)
    assert find_restore(store).manifest == first
    second = assemble_shards(shards, GRID, attempt=2)
    commit(store, second)
    assert find_restore(store).manifest == second
    assert {key: store.get(key) for key in before} == before


def test_restore_does_not_pass_over_another_version(store):
    _save(store, step=100)
    newer = _save(store, step=200)
    _spoil(store, newer.key, lambda data: data.replace(b'"version": 3', b'"version": 9'))
    with pytest.raises(UnknownVersionError, match="version 9"):
        find_restore(store)


def test_store_that_fails_is_not_taken_for_a_broken_checkpoint():
    store = FailingStore()
    _save(store, step=100)
    store.failures["size"] = 1
    with pytest.raises(StorageError):
        find_restore(store)
