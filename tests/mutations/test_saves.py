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
