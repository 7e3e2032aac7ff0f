"""What a URI names, and what is said about it."""

import pytest

from raymega.checkpoint.tools.inspection import (
    list_checkpoints,
    open_checkpoint,
    runs_below,
    verify_checkpoints,
)
from raymega.errors import ConfigError
from raymega.storage.local import LocalStore
from tests.support.fakes import FakeClock
from tests.support.leases import take_lease
from tests.unit.checkpoint.support import MODELS, make_grid, save_checkpoint

GRID, MODEL = make_grid("tp2-dp2"), MODELS["gpt2-tied"]


@pytest.fixture
def run(tmp_path):
    """A run below a folder with a misleading name, with two checkpoints."""
    root = tmp_path / "checkpoints" / "step-by-step" / "run"
    store = LocalStore(root)
    return root, store, [save_checkpoint(store, MODEL, GRID, step=step) for step in (200, 100)]


def _flip(store, key, at):
    data = bytearray(store.get(key))
    data[at] ^= 1
    store.put(key, [data], overwrite=True)


def test_run_lists_its_checkpoints_newest_first(run):
    root, _, (newer, older) = run
    rows = list_checkpoints(f"{root}/")
    assert [row.key for row in rows] == [newer.key, older.key]
    assert [(row.step, row.attempt, row.num_files) for row in rows] == [(200, 1, 4), (100, 1, 4)]
    assert all(row.total_bytes == newer.total_bytes and row.faults == () for row in rows)


@pytest.mark.parametrize("tail", ["", "/", "/manifest-a0001.json"])
def test_checkpoint_and_manifest_name_themselves(run, tail):
    root, _, (_, older) = run
    uri = f"file://{root}/checkpoints/step-00000100{tail}"
    assert [row.key for row in list_checkpoints(uri)] == [older.key]
    store, manifest = open_checkpoint(uri)
    assert manifest == older and store.uri == str(root)


def test_run_opens_its_newest(run):
    root, _, (newer, _) = run
    assert open_checkpoint(str(root))[1] == newer


def test_nothing_there_is_the_users_mistake(tmp_path, run):
    with pytest.raises(ConfigError, match="there is no checkpoint at"):
        list_checkpoints(str(tmp_path))
    take_lease(LocalStore(tmp_path), FakeClock())
    assert list_checkpoints(str(tmp_path)) == [], "a run that has not saved yet"
    with pytest.raises(ConfigError, match="there is nothing at"):
        list_checkpoints(str(tmp_path / "none"))
    for uri in (str(tmp_path / "none"), f"{run[0]}/checkpoints/step-00000300"):
        for use in (open_checkpoint, verify_checkpoints):
            with pytest.raises(ConfigError, match="there is no checkpoint at"):
                use(uri)
    with pytest.raises(ConfigError, match="scheme 'gs' is unknown"):
        list_checkpoints("gs://bucket/run")


def test_list_notices_a_torn_file_and_a_damaged_manifest(run):
    root, store, (newer, older) = run
    key = next(iter(newer.file_sizes()))
    store.put(key, [store.get(key)[:-1]], overwrite=True)
    _flip(store, older.key, 200)
    torn, damaged = list_checkpoints(str(root))
    assert key in torn.faults[0] and torn.total_bytes > 0
    assert older.key in damaged.faults[0] and (damaged.step, damaged.created) == (100, "")


def test_verify_finds_a_flipped_bit_that_sizes_do_not_show(run):
    root, store, (newer, older) = run
    box = newer.boxes[3]
    _flip(store, newer.file_key(box), box.start)
    assert all(row.faults == () for row in list_checkpoints(str(root)))
    bad, good = verify_checkpoints(str(root))
    assert len(bad.faults) == 1 and box.tensor in bad.faults[0] and "crc32" in bad.faults[0]
    assert good.faults == () and good.key == older.key


def test_verify_says_a_missing_file_once(run):
    root, store, (newer, _) = run
    key = next(iter(newer.file_sizes()))
    store.delete(key)
    bad, _ = verify_checkpoints(str(root))
    assert len(bad.faults) == 1 and f"{key} is missing" in bad.faults[0]


def test_folder_of_runs_and_hugging_faces_folder_are_told(tmp_path, run):
    root = run[0].parent
    (root / "other" / "logs").mkdir(parents=True)
    assert runs_below(str(root)) == ["run"] and runs_below("s3://bucket/runs") == []
    with pytest.raises(ConfigError, match=rf"give one of its runs, such as {root}/run, of run; "):
        open_checkpoint(f"{root}/")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"raymega convert hf-import {tmp_path}/hf --out URI"):
        open_checkpoint(str(tmp_path / "hf"))
