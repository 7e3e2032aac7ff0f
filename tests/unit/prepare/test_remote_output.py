"""Preparations into an object store: claim, shards of a task, commit, and whose place it is."""

from uuid import uuid4

import pytest

from raymega.data.format import META_FILE, TOKENIZER_FILE, read_meta
from raymega.data.remote_dataset import local_copy, meta_at
from raymega.errors import ConfigError, DataError
from raymega.prepare.remote_output import StoreOutput
from raymega.storage.registry import open_store
from tests.support.servers.s3_server import BUCKET, environment, exported, moto_server
from tests.unit.data.datasets import write_dataset

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
    """A claim, and the shards of one task."""
    assert output.find_finished(RECIPE) is None
    output.claim(RECIPE)
    output.put(TOKENIZER_FILE, b"{}")
    with output.task_folder() as folder:
        assert (folder / TOKENIZER_FILE).read_bytes() == b"{}"
        return write_dataset(folder)


def test_committed_dataset_is_found_again_by_its_recipe(output, tmp_path):
    meta = _write(output)
    assert META_FILE not in _keys(output), "nothing is a dataset before the commit"
    output.commit(meta)
    assert output.find_finished(RECIPE) == meta == meta_at(output.uri)
    assert _keys(output) == [
        META_FILE, TOKENIZER_FILE, "train/000000.arrow", "train/000001.arrow", "valid/000000.arrow",
    ]  # fmt: skip
    assert read_meta(local_copy(output.uri, cache=tmp_path)) == meta


def test_other_recipe_and_missing_shards_are_refused(output):
    output.commit(_write(output))
    with pytest.raises(ConfigError, match="tokenizer bytes there, bpe:300 here"):
        output.find_finished({"tokenizer": "bpe:300"})
    open_store(output.uri).delete("train/000000.arrow")
    with pytest.raises(DataError, match="does not exist"):
        output.find_finished(RECIPE)


def test_unfinished_output_is_taken_over_clean_and_foreign_objects_are_left_alone(output):
    _write(output)
    output.claim({"tokenizer": "other"})
    assert _keys(output) == ["preparing.json", TOKENIZER_FILE]
    foreign = StoreOutput(uri=f"{output.uri}-foreign")
    foreign.put("train/mine", b"mine")
    with pytest.raises(ConfigError, match="is not empty and is no dataset"):
        foreign.claim(RECIPE)
    assert _keys(foreign) == ["train/mine"]


def test_task_that_fails_sends_nothing(output):
    output.put(TOKENIZER_FILE, b"{}")
    with pytest.raises(ZeroDivisionError), output.task_folder() as folder:
        write_dataset(folder)
        raise ZeroDivisionError
    assert _keys(output) == [TOKENIZER_FILE]


def test_place_that_cannot_be_written_is_the_users_mistake(endpoint):
    with pytest.raises(ConfigError, match=r"--out=.*no-such-bucket/x.*NoSuchBucket"):
        StoreOutput(uri="s3://no-such-bucket/x").find_finished(RECIPE)
