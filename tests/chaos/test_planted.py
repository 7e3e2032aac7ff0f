"""`raymega chaos` turns red when recovery repeats samples, loses a step, or leaves something behind."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.mutations.drills import DRILL_MUTATIONS
from tests.mutations.planted import PACKAGE, planted_text
from tests.support.command import VERIFY
from tests.support.drills import COMMON, LAYOUTS

CHAOS = "from raymega.cli.main import run; run()"


@pytest.mark.matrix
@pytest.mark.ray
@pytest.mark.parametrize("row", DRILL_MUTATIONS, ids=lambda row: row.name)
def test_drill_of_a_package_with_a_planted_mistake_is_red(row, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "raymega", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "raymega" / row.file).write_text(planted_text(row))
    words = ["chaos", str(VERIFY), "--fault", row.fault, "--json", "--out", str(tmp_path / "out")]
    for setting in (*COMMON, *LAYOUTS["dp2"]):
        words += ["--set", setting]
    done = subprocess.run(
        [sys.executable, "-c", CHAOS, *words],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, timeout=500, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    faults = json.loads(done.stdout)["faults"]
    assert any(row.caught in fault for fault in faults), faults
