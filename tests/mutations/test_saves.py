"""Every planted mistake in saves, leases, guards, plans, readers and text is caught before it does harm."""

import json
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
from tests.support.preloaded import nursery

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 500.0
CODE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tests.mutations.outcomes import main
with open(sys.argv[3]) as planted:
    main(sys.argv[2], json.load(planted))
"""


SCRIPTS = {
    "saves": (SAVE_MUTATIONS, "whole"),
    "leases": (LEASE_MUTATIONS, "sound"),
    "guards": (GUARD_MUTATIONS, "sound"),
    "plans": (PLAN_MUTATIONS, "sound"),
    "readers": (READER_MUTATIONS, "sound"),
    "conversations": (CONVERSATION_MUTATIONS, "sound"),
    "streams": (STREAM_MUTATIONS, "sound"),
    "generations": (GENERATION_MUTATIONS, "sound"),
    "task_scores": (TASK_MUTATIONS, "sound"),
    "curations": (CURATION_MUTATIONS, "sound"),
}
"""Rows of each script, and what it says of the package as it is."""
WIDE = ("streams", "generations", "task_scores", "curations")
ROWS_A_CASE = 3
"""Each row imports the package anew, and so does the sound package of each case."""


def _cases():
    """Every row; `make test` plants those of one case of each script that is not wide."""
    for script, (rows, sound) in SCRIPTS.items():
        is_wide = script in WIDE
        mark = pytest.mark.wide if is_wide else pytest.mark.sample(1, of=script)
        size = len(rows) if is_wide else ROWS_A_CASE
        for first in range(0, len(rows), size):
            name = f"{script}-{first}" if size < len(rows) else script
            yield pytest.param(script, rows[first : first + size], sound, id=name, marks=mark)


@pytest.mark.parametrize(("script", "rows", "sound"), list(_cases()))
def test_every_planted_mistake_is_caught(script, rows, sound, tmp_path):
    planted = [("", ""), *((row.file, planted_text(row)) for row in rows)]
    (tmp_path / "planted").write_text(json.dumps(planted))
    with (tmp_path / "log").open("w") as log:
        process = nursery().start(CODE, [str(ROOT), script, str(tmp_path / "planted")], stderr=log)
        process.stdin.close()
        said = process.stdout.read()
    assert process.wait(TIMEOUT_S) == 0, (tmp_path / "log").read_text()
    healthy, *found = map(json.loads, said.splitlines())
    assert healthy == sound
    assert dict(zip([row.name for row in rows], found, strict=True)) == {
        row.name: row.caught for row in rows
    }
