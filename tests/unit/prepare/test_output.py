import pytest

from raymega.data.format import META_FILE, read_meta
from raymega.errors import ConfigError, DataError
from raymega.prepare.output import claim, commit, find_finished
from tests.unit.data.datasets import write_dataset

RECIPE = {"tokenizer": "bytes"}


def test_committed_dataset_is_found_again_by_its_recipe(tmp_path):
    folder = tmp_path / "out"
    claim(folder, RECIPE)
    assert find_finished(folder, RECIPE) is None
    meta = write_dataset(folder)
    (folder / META_FILE).unlink()
    commit(folder, meta)
    assert find_finished(folder, RECIPE) == meta == read_meta(folder)
    assert sorted(path.name for path in folder.iterdir()) == [META_FILE, "train", "valid"]


def test_other_recipe_is_refused_and_named(tmp_path):
    write_dataset(tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer bytes there, bpe:300 here"):
        find_finished(tmp_path, {"tokenizer": "bpe:300"})


def test_torn_dataset_is_not_taken_for_finished(tmp_path):
    write_dataset(tmp_path)
    (tmp_path / "train/000000.arrow").unlink()
    with pytest.raises(DataError, match="does not exist"):
        find_finished(tmp_path, RECIPE)


def test_unfinished_output_is_no_dataset_and_is_taken_over_clean(tmp_path):
    claim(tmp_path, RECIPE)
    write_dataset(tmp_path)
    (tmp_path / META_FILE).unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        read_meta(tmp_path)
    claim(tmp_path, {"tokenizer": "other"})
    assert [path.name for path in tmp_path.iterdir()] == ["preparing.json"]


def test_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and is no dataset"):
        claim(tmp_path, RECIPE)
    assert (tmp_path / "train/mine.txt").read_text() == "mine"
