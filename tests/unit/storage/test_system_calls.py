"""A save whose system calls fail or kill it, one by one: what was committed stays, and is chosen."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raymega.checkpoint.format.manifest import find_restore
from raymega.storage.local import LocalStore
from tests.unit.checkpoint.large import holds_step, save_step

pytestmark = [
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace not installed"),
]

SAVE = """
import sys
from pathlib import Path
from raymega.checkpoint.format.manifest import commit
from raymega.storage.local import LocalStore
from tests.unit.checkpoint.large import make_manifest, write_step
store = LocalStore(Path(sys.argv[1]))
shard = write_step(store, 200)
if shard.error:
    sys.exit(3)
commit(store, make_manifest(shard))
"""
REFUSED, FAILED, KILLED = 1, 3, -9


def _save_under(folder: Path, fault: str) -> int:
    """The status of a process that saves step 200 while ``fault``, in strace's words, is injected."""
    calls = fault.partition(":")[0]
    command = [
        "strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}", "-e", f"inject={fault}",
        sys.executable, "-B", "-c", SAVE, str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=400, check=False)
    return done.returncode


@pytest.mark.sample(1)
@pytest.mark.parametrize(("fault", "status", "step"), [
    ("fsync:error=EIO:when=1", REFUSED, 100),  # of each thread: files are tried again, the commit fails
    ("fsync:error=EIO", FAILED, 100),
    ("rename:error=EIO", FAILED, 100),
    ("fsync:signal=KILL:when=1", KILLED, 100),
    ("link,linkat:error=EIO:signal=KILL:when=1", KILLED, 100),
])  # fmt: skip
def test_what_was_committed_is_chosen(tmp_path, fault, status, step):
    store = LocalStore(tmp_path)
    old = save_step(store, 100)
    assert _save_under(tmp_path, fault) == status
    found = find_restore(store).manifest
    assert found.step == step and holds_step(store, found) and holds_step(store, old)
    new = save_step(store, 300, attempt=2)
    assert find_restore(store).manifest == new and holds_step(store, new)
