"""Preparations into an object store: claim, what groups keep, commit, and whose place it is."""

from uuid import uuid4

import numpy as np
import pytest

from raymega.data.arrow import ShardWriter
from raymega.data.format import LENGTHS_FILE, META_FILE, TOKENIZER_FILE
from raymega.data.streaming.fetcher import Fetcher
from raymega.data.streaming.remote_dataset import meta_at, open_files
from raymega.errors import ConfigError, DataError
from raymega.prepare import groups, pipeline
from raymega.prepare.origins import trace
from raymega.prepare.readers.pieces import ShardGroup
from raymega.prepare.records import DISPROVED_FILE
from raymega.prepare.remote_output import StoreOutput
from raymega.prepare.shards import GroupDone, SplitPart
from raymega.storage.registry import open_store
from tests.support.servers.s3_server import BUCKET, environment, exported, moto_server
from tests.unit.data.datasets import write_dataset
from tests.unit.prepare import corpora

RECIPE = {"tokenizer": "bytes"}


@pytest.fixture(scope="module")
def endpoint():
    with moto_server() as at, exported(environment(at)):
        yield at


@pytest.fixture
def output(endpoint):
    return StoreOutput(uri=f"s3://{BUCKET}/{uuid4().hex}")


def _keys(output):
    return list(open_store(output.uri).list(""))


def _write(output):
    """A claim, and the shards that are joined."""
    assert output.find_finished(RECIPE) is None
    output.claim(RECIPE)
    output.put_state("a.npy", b"1234")
    with output.shard_folders(["a.npy"]) as (state, folder):
        assert (state / "a.npy").read_bytes() == b"1234"
        return write_dataset(folder)


def _group(index, key):
    return ShardGroup(index=index, pieces=(), key=key)


def _run_task(output, key):
    """What a task of the group writes, but its record."""
    output.put_state(TOKENIZER_FILE, b"{}")
    with output.task_folder() as folder:
        assert (folder / TOKENIZER_FILE).read_bytes() == b"{}"
        with ShardWriter(folder, f"train/{key}.arrow", dtype="uint16") as writer:
            writer.append(np.arange(9, dtype=np.uint16))
            shard = writer.close()
        np.save(folder / f"train/{key}.npy", np.zeros((1, 2), dtype=np.int64))
    part = SplitPart(shard=shard, num_text_bytes=9, counts=np.arange(3))
    return GroupDone(index=0, num_rows=(1,), parts={"train": part})


def test_committed_dataset_is_found_again_by_its_recipe(output, tmp_path):
    meta = _write(output)
    assert META_FILE not in _keys(output), "nothing is a dataset before the commit"
    output.commit(meta)
    assert output.find_finished(RECIPE) == meta == meta_at(output.uri)
    assert _keys(output) == [
        META_FILE, "train/000000.arrow", "train/000001.arrow", "valid/000000.arrow",
    ]  # fmt: skip
    assert open_files(output.uri, Fetcher(limit_bytes=1, root=tmp_path))[0] == meta


def test_other_recipe_and_missing_shards_are_refused(output):
    output.commit(_write(output))
    with pytest.raises(ConfigError, match="tokenizer bytes there, bpe:300 here"):
        output.find_finished({"tokenizer": "bpe:300"})
    open_store(output.uri).delete("train/000000.arrow")
    with pytest.raises(DataError, match="does not exist"):
        output.find_finished(RECIPE)


def test_finished_groups_are_found_again_and_the_others_are_removed(output):
    output.claim(RECIPE)
    done = _run_task(output, "done")
    output.put_record("done", done)
    output.put_record("unwanted", done)
    output.put_record("torn", _run_task(output, "torn"))
    open_store(output.uri).delete("_state/train/torn.npy")
    assert not output.has_state(DISPROVED_FILE)
    output.put_state(DISPROVED_FILE, b"by a group")
    wanted = [_group(5, "done"), _group(6, "unfinished"), _group(7, "torn")]
    (found,) = list(output.find_done(wanted))
    assert output.has_state(DISPROVED_FILE)
    assert found.index == 5 and found.parts["train"].shard == done.parts["train"].shard
    assert _keys(output) == [
        f"_state/{DISPROVED_FILE}", "_state/groups/done.json", "_state/recipe.json", "_state/tokenizer.json",
        "_state/train/done.arrow", "_state/train/done.npy",
    ]  # fmt: skip


def test_unfinished_output_is_taken_over_and_foreign_objects_are_left_alone(output):
    _write(output)
    output.claim({"tokenizer": "other"})
    assert [key for key in _keys(output) if not key.startswith("_state/")] == []
    foreign = StoreOutput(uri=f"{output.uri}-foreign")
    foreign.put("train/mine", [b"mine"])
    with pytest.raises(ConfigError, match="is not empty and is no dataset"):
        foreign.claim(RECIPE)
    assert _keys(foreign) == ["train/mine"]


def test_task_that_fails_sends_nothing(output):
    output.put_state(TOKENIZER_FILE, b"{}")
    with pytest.raises(ZeroDivisionError), output.task_folder() as folder:
        write_dataset(folder)
        raise ZeroDivisionError
    assert _keys(output) == [f"_state/{TOKENIZER_FILE}"]


def test_place_that_cannot_be_written_is_the_users_mistake(endpoint):
    with pytest.raises(ConfigError, match=r"--out=.*no-such-bucket/x.*NoSuchBucket"):
        StoreOutput(uri="s3://no-such-bucket/x").find_finished(RECIPE)


def test_store_to_store_is_continued_after_a_refusal_and_equals_a_folder(
    endpoint, tmp_path, without_ray, monkeypatch
):
    monkeypatch.setattr(groups, "MIN_GROUP_BYTES", 1 << 14)
    monkeypatch.setattr(pipeline, "MANY_SHARDS", 1)
    raw = corpora.json_lines(corpora.texts())
    (tmp_path / "corpus.jsonl").write_bytes(raw)
    corpora.prepared(tmp_path / "corpus.jsonl", tmp_path / "near")
    # The same lines in a store, and a bad one.
    root = f"s3://{BUCKET}/{uuid4().hex}"
    source, out = open_store(f"{root}/source"), f"{root}/out"
    source.put("corpus.jsonl", [raw + b"{\n"], overwrite=True)
    with pytest.raises(
        ConfigError, match=rf"{root}/source/corpus\.jsonl@{len(raw)} has no document"
    ):
        corpora.prepared(f"{root}/source", out)
    keys = list(open_store(out).list(""))
    assert {key.partition("/")[0] for key in keys} == {"_state"}
    assert sum(key.startswith("_state/groups/") for key in keys) > 2
    done = corpora.prepared(f"{root}/source", out, max_bad_lines=1)
    assert done.meta.source.num_bad_lines == 1
    near = corpora.content(tmp_path / "near", but=("dataset.json", "sources.json"))
    far = {key: open_store(out).get(key) for key in open_store(out).list("")}
    assert near.items() <= far.items() and len(far) == len(near) + 2
    assert {f"{name}/{LENGTHS_FILE}" for name in done.meta.splits} <= set(near)
    token = done.meta.splits["train"].num_tokens - 1
    origin = trace(out, done.meta, split="train", token=token)
    assert origin.file == f"{root}/source/corpus.jsonl" and 0 < origin.row < corpora.NUM_TEXTS
