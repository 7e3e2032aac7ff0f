"""Every planted mistake in saves, leases, guards, plans, readers and text is caught before it does harm."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations.conversations import CONVERSATION_MUTATIONS
from tests.mutations.curations import CURATION_MUTATIONS
from tests.mutations.generations import GENERATION_MUTATIONS
from tests.mutations.guards import GUARD_MUTATIONS
from tests.mutations.leases import LEASE_MUTATIONS
from tests.mutations.plans import PLAN_MUTATIONS
from tests.mutations.planted import planted_text
from tests.mutations.readers import READER_MUTATIONS
from tests.mutations.saves import SAVE_MUTATIONS
from tests.mutations.streams import STREAM_MUTATIONS
from tests.mutations.task_scores import TASK_MUTATIONS

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]


def _copy(folder: Path) -> Path:
    shutil.copytree(
        ROOT / "raymega", folder / "raymega", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


@pytest.mark.parametrize(
    ("script", "rows", "sound"),
    [
        ("saves", SAVE_MUTATIONS, "whole"),
        ("leases", LEASE_MUTATIONS, "sound"),
        ("guards", GUARD_MUTATIONS, "sound"),
        ("plans", PLAN_MUTATIONS, "sound"),
        ("readers", READER_MUTATIONS, "sound"),
        ("conversations", CONVERSATION_MUTATIONS, "sound"),
        pytest.param("streams", STREAM_MUTATIONS, "sound", marks=pytest.mark.wide),
        pytest.param("generations", GENERATION_MUTATIONS, "sound", marks=pytest.mark.wide),
        pytest.param("task_scores", TASK_MUTATIONS, "sound", marks=pytest.mark.wide),
        pytest.param("curations", CURATION_MUTATIONS, "sound", marks=pytest.mark.wide),
    ],
    ids=[
        "saves",
        "leases",
        "guards",
        "plans",
        "readers",
        "conversations",
        "streams",
        "generations",
        "task scores",
        "curations",
    ],
)
def test_every_planted_mistake_is_caught(script, rows, sound, tmp_path):
    folders = [_copy(tmp_path / "healthy")]
    for number, row in enumerate(rows):
        folders.append(_copy(tmp_path / str(number)))
        (folders[-1] / "raymega" / row.file).write_text(planted_text(row))
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutations.outcomes", script, *map(str, folders)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    healthy, *found = map(json.loads, done.stdout.splitlines())
    assert healthy == sound
    assert dict(zip([row.name for row in rows], found, strict=True)) == {
        row.name: row.caught for row in rows
    }
