"""Every `raymega checkpoint` command on checkpoints in an object store, and between it and a folder."""

import json
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from raymega.checkpoint.format.manifest import find_restore
from raymega.cli.checkpoint.command import checkpoint_app
from raymega.storage.local import LocalStore
from raymega.storage.s3 import S3Store
from tests.support.servers.s3_server import BUCKET, environment, exported, moto_server
from tests.unit.checkpoint.large import PART, holds_step, save_step


@pytest.fixture(scope="module")
def endpoint():
    with moto_server() as at, exported(environment(at)):
        yield at


@pytest.fixture
def store(endpoint):
    return S3Store(BUCKET, f"team/runs/r-{uuid4().hex}", part_bytes=PART)


def _told(*words, code=0):
    done = CliRunner().invoke(checkpoint_app, [*map(str, words), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.mark.wide
def test_commands_of_the_whole_life_of_checkpoints(store, tmp_path):
    for step in (100, 200, 300):
        save_step(store, step)
    rows = _told("list", store.uri)["checkpoints"]
    assert [(row["step"], row["num_files"], row["is_whole"]) for row in rows] == [
        (300, 3, True), (200, 3, True), (100, 3, True),
    ]  # fmt: skip
    assert _told("show", store.uri)["step"] == 300
    assert all(row["is_whole"] for row in _told("verify", store.uri)["checkpoints"])

    older, newer = (f"{store.uri}/checkpoints/step-{step:08d}" for step in (100, 300))
    found = _told("diff", older, newer)
    assert found["steps"] == [100, 300] and all(t["relative"] > 0 for t in found["tensors"])

    copied = _told("copy", older, tmp_path)
    assert (copied["step"], copied["files_written"]) == (100, 3)
    back = f"{store.uri}-back"
    assert _told("copy", tmp_path, back)["files_written"] == 3
    assert _told("copy", older, back)["files_found"] == 3
    assert all(t["relative"] == 0 for t in _told("diff", older, back)["tensors"])
    assert holds_step(LocalStore(tmp_path), find_restore(LocalStore(tmp_path)).manifest)

    rule = ("--keep-last", "1", "--keep-every", "100000")
    would = _told("prune", store.uri, *rule, "--dry-run")["deleted"]
    assert len(would) == 2 * 4 and _told("prune", store.uri, *rule)["deleted"] == would
    assert [row["step"] for row in _told("list", store.uri)["checkpoints"]] == [300]

    key = find_restore(store).manifest.file_key(find_restore(store).manifest.boxes[0])
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, [data], overwrite=True)
    (row,) = _told("verify", store.uri, code=1)["checkpoints"]
    assert not row["is_whole"] and key in row["faults"][0]
    assert _told("verify", back)["checkpoints"][0]["is_whole"], "the copy is a copy"
