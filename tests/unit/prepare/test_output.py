import pytest

from raymega.data.format import META_FILE, read_meta
from raymega.errors import ConfigError, DataError
from raymega.prepare.output import FolderOutput
from tests.unit.data.datasets import write_dataset

RECIPE = {"tokenizer": "bytes"}


def test_committed_dataset_is_found_again_by_its_recipe(tmp_path):
    output = FolderOutput(folder=tmp_path / "out")
    output.claim(RECIPE)
    assert output.find_finished(RECIPE) is None
    with output.shard_folders([]) as (_, final):
        meta = write_dataset(final)
        (final / META_FILE).unlink()
    assert [path.name for path in output.folder.iterdir()] == ["_state"]
    output.commit(meta)
    assert output.find_finished(RECIPE) == meta == read_meta(output.folder)
    assert sorted(path.name for path in output.folder.iterdir()) == [META_FILE, "train", "valid"]


def test_other_recipe_is_refused_and_named(tmp_path):
    write_dataset(tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer bytes there, bpe:300 here"):
        FolderOutput(folder=tmp_path).find_finished({"tokenizer": "bpe:300"})


def test_torn_dataset_is_not_taken_for_finished(tmp_path):
    write_dataset(tmp_path)
    (tmp_path / "train/000000.arrow").unlink()
    with pytest.raises(DataError, match="does not exist"):
        FolderOutput(folder=tmp_path).find_finished(RECIPE)


def test_commit_that_was_interrupted_is_done_again(tmp_path):
    output = FolderOutput(folder=tmp_path)
    output.claim(RECIPE)
    # Moved by a commit that ended before dataset.json.
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "000009.arrow").write_text("old")
    with pytest.raises(ConfigError, match="does not exist"):
        read_meta(tmp_path)
    output.claim({"tokenizer": "other"})
    with output.shard_folders([]) as (_, final):
        meta = write_dataset(final)
        (final / META_FILE).unlink()
    output.commit(meta)
    assert not (tmp_path / "train" / "000009.arrow").exists()
    assert read_meta(tmp_path) == meta


def test_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and is no dataset"):
        FolderOutput(folder=tmp_path).claim(RECIPE)
    assert (tmp_path / "train/mine.txt").read_text() == "mine"
