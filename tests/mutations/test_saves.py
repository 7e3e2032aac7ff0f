"""Every planted mistake in saving is caught before its checkpoint is trained from."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations.saves import SAVE_MUTATIONS

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]


def _copy(folder: Path) -> Path:
    shutil.copytree(
        ROOT / "raymega", folder / "raymega", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


def test_every_planted_mistake_in_saving_is_caught(tmp_path):
    folders = [_copy(tmp_path / "healthy")]
    for number, row in enumerate(SAVE_MUTATIONS):
        folders.append(_copy(tmp_path / str(number)))
        file = folders[-1] / "raymega" / row.file
        text = file.read_text()
        assert text.count(row.old) == 1, f"{row.file} no longer has the text of {row.name!r} once"
        file.write_text(text.replace(row.old, row.new))
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutations.saves", *map(str, folders)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    healthy, *found = map(json.loads, done.stdout.splitlines())
    assert healthy == "whole"
    assert dict(zip([row.name for row in SAVE_MUTATIONS], found, strict=True)) == {
        row.name: row.caught for row in SAVE_MUTATIONS
    }
