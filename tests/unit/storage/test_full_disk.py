"""A disk that fills up in a save: the save fails, its rest goes, the older checkpoint stays."""

import subprocess

import pytest

from raymega.checkpoint.format.manifest import find_restore
from raymega.storage.local import PARTIAL_FOLDER, LocalStore
from tests.unit.checkpoint.large import holds_step, save_step, write_step

ROOM = 20 << 20


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 20 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_fails_the_save_and_nothing_else(disk):
    store = LocalStore(disk)
    old = save_step(store, 100)
    for step in (200, 300):
        shard = write_step(store, step)
        assert "No space left on device" in shard.error and shard.boxes == ()
        assert list((disk / PARTIAL_FOLDER).iterdir()) == [], "what was begun gives its room back"
        found = find_restore(store)
        assert found.manifest == old and found.broken == () and holds_step(store, old)
        for key in list(store.list(f"checkpoints/step-{step:08d}/")):  # as the driver does
            store.delete(key)
    subprocess.run(["mount", "-o", f"remount,size={3 * ROOM}", str(disk)], check=True)
    new = save_step(store, 400)
    assert find_restore(store).manifest == new and holds_step(store, new)
