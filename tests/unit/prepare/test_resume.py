"""A preparation that ended anywhere is continued, and gives the bytes of an undisturbed one."""

import json
import os
import signal
import subprocess
import sys

import pytest

from raymega.data.format import META_FILE
from raymega.errors import ConfigError
from raymega.prepare import groups, pipeline
from tests.unit.prepare import corpora
from tests.unit.prepare.corpora import content, prepared

pytestmark = pytest.mark.usefixtures("without_ray", "small_groups")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, part in (("a", slice(0, 50)), ("b", slice(50, None))):
        (folder / f"{name}.jsonl").write_bytes(corpora.json_lines(corpora.texts()[part]))
    return folder


@pytest.fixture
def ran(monkeypatch):
    """Indices of the groups that ran."""
    indices, write_group = [], pipeline.write_group

    def count(group, **options):
        indices.append(group.index)
        return write_group(group, **options)

    monkeypatch.setattr(pipeline, "write_group", count)
    return indices


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.wide)])
def test_preparation_that_is_killed_at_a_write_continues_to_the_same_bytes(
    step, corpus, tmp_path, ran
):
    prepared(corpus, tmp_path / "undisturbed")
    expected, num_groups = content(tmp_path / "undisturbed"), len(ran)
    assert num_groups > 8
    command = ["-m", "tests.unit.prepare.killed", str(corpus), str(tmp_path / "out"), str(step)]
    told = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(lines) > 8 and {line["signal"] for line in lines} == {signal.SIGKILL}, told.stderr
    num_again = []
    for line in lines:
        # Only the commit moves files out of _state.
        assert line["left"] == ["_state"] or line in lines[-6:]
        ran.clear()
        done = prepared(corpus, line["out"])
        assert content(done.uri) == expected
        num_again.append(len(ran))
    assert num_again[0] == num_groups and num_again == sorted(num_again, reverse=True)
    assert len(set(num_again)) > 3 and not any(num_again[-6:])


def test_finished_groups_are_kept_when_a_corpus_is_refused(corpus, tmp_path, ran):
    (corpus / "c.jsonl").write_bytes(b"{\n")
    with pytest.raises(ConfigError, match=r"c\.jsonl@0 has no document"):
        prepared(corpus, tmp_path / "out")
    first = len(ran)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["_state"]
    # Repaired, it is its group alone that is done.
    (corpus / "c.jsonl").write_bytes(b'{"text": "one more"}\n')
    prepared(corpus, tmp_path / "out")
    assert ran[first:] == [first - 1]
    prepared(corpus, tmp_path / "undisturbed")
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


def test_more_bad_lines_are_allowed_without_doing_the_rest_again(corpus, tmp_path, ran):
    (corpus / "c.jsonl").write_bytes(b"{\n")
    with pytest.raises(ConfigError, match="max-bad-lines"):
        prepared(corpus, tmp_path / "out")
    first = len(ran)
    done = prepared(corpus, tmp_path / "out", max_bad_lines=1)
    assert ran[first:] == [first - 1] and done.meta.source.num_bad_lines == 1


def test_other_tokenizer_does_all_groups_again(corpus, tmp_path, ran):
    (corpus / "c.jsonl").write_bytes(b"{\n")
    for tokenizer in ("bytes", "bpe:260"):
        with pytest.raises(ConfigError, match="max-bad-lines"):
            prepared(corpus, tmp_path / "out", tokenizer=tokenizer, max_bad_lines=0)
    (corpus / "c.jsonl").unlink()
    ran.clear()
    done = prepared(corpus, tmp_path / "out", tokenizer="bpe:260")
    assert len(ran) == max(ran) + 1
    prepared(corpus, tmp_path / "undisturbed", tokenizer="bpe:260")
    assert content(done.uri) == content(tmp_path / "undisturbed")


@pytest.mark.parametrize("damage", ["record", "tokens", "origins"])
def test_group_whose_files_are_torn_is_done_again(damage, corpus, tmp_path, ran):
    (corpus / "c.jsonl").write_bytes(b"{\n")
    with pytest.raises(ConfigError, match="max-bad-lines"):
        prepared(corpus, tmp_path / "out")
    first = len(ran)
    pattern = {"record": "groups/*.json", "tokens": "train/*.arrow", "origins": "train/*.npy"}[
        damage
    ]
    torn = sorted((tmp_path / "out" / "_state").glob(pattern))[1]
    if damage == "origins":
        torn.unlink()
    else:
        os.truncate(torn, torn.stat().st_size - 9)
    (corpus / "c.jsonl").unlink()
    done = prepared(corpus, tmp_path / "out")
    # Its group, and the last one, which had c.jsonl.
    assert len(ran) == first + 2
    prepared(corpus, tmp_path / "undisturbed")
    assert content(done.uri) == content(tmp_path / "undisturbed")


def test_cuts_and_groups_do_not_change_the_dataset(corpus, tmp_path, monkeypatch):
    for size in (1 << 12, 1 << 14, 1 << 20):
        monkeypatch.setattr(groups, "MIN_GROUP_BYTES", size)
        prepared(corpus, tmp_path / f"{size}")
    found = [content(tmp_path / f"{size}") for size in (1 << 12, 1 << 14, 1 << 20)]
    assert found[0] == found[1] == found[2] and META_FILE in found[0]
