"""A run whose file system is truly full at its last save: no step is trained twice, and the cause is told."""

import os
import shutil
import subprocess

import pytest

from tests.support.command import Outcome, raymega, train

pytestmark = [
    pytest.mark.ray,
    pytest.mark.wide,
    pytest.mark.skipif(os.name != "posix", reason="mounts a tmpfs"),
]

STEPS, SIZE = 6, 3 * 2**20
LEFT = 256 * 2**10
"""Bytes that stay free: enough for the driver's small files, too few for a data file of half a MiB."""


@pytest.fixture
def disk(tmp_path):
    """A file system of 3 MiB in which a run has saved its first half, and that is full then."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"mounting a file system needs root: {mounted.stderr.strip()}")
    try:
        first = _train(tmp_path, f"run.steps={STEPS // 2}")
        assert first.code == 0, first.stderr
        free = shutil.disk_usage(tmp_path).free
        (tmp_path / "ballast").write_bytes(bytes(free - LEFT))
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def _train(disk, *more, **options) -> Outcome:
    """Train with a save at the end only."""
    job = (
        f"checkpoint.uri={disk}", f"run.steps={STEPS}", "checkpoint.every=0", "run.name=full",
        "tracking.mlflow_uri=off", "parallel.pp=1", "parallel.dp=2", "parallel.sharding=none",
    )  # fmt: skip
    return train(*job, *more, address="local", **options)


def _steps(outcome: Outcome) -> list[int]:
    return [event["step"] for event in outcome.all("step")]


SECOND_HALF = list(range(STEPS // 2 + 1, STEPS + 1))


def test_last_save_without_space_ends_the_run_with_its_cause_and_no_step_is_repeated(disk):
    ended = _train(disk, "checkpoint.last_save_retry_s=1")
    last_line = ended.stderr.strip().splitlines()[-1]
    assert (ended.code, _steps(ended)) == (4, SECOND_HALF), ended.stderr
    assert "No space left on device" in last_line and ".safetensors" in last_line, last_line
    assert "start the same job again" in last_line and "last_save_retry_s" in last_line
    # the checkpoint before it is sound, and the same job finishes once there is room
    (disk / "ballast").unlink()
    assert raymega("checkpoint", "verify", f"{disk}/full").returncode == 0
    again = _train(disk)
    assert (again.code, _steps(again)) == (0, SECOND_HALF), again.stderr


def test_run_finishes_when_space_is_freed_while_the_last_save_is_tried_again(disk):
    def on_stderr(line):
        if "tries again" in line:
            (disk / "ballast").unlink(missing_ok=True)

    ended = _train(disk, on_stderr=on_stderr)
    assert (ended.code, _steps(ended)) == (0, SECOND_HALF), ended.stderr
    assert "tries again" in ended.stderr
    assert ended.all("checkpoint")[-1]["step"] == STEPS
    assert {event["attempt"] for event in ended.all("step")} == {2}
